"""One request through every service, on a real broker, with fake engines."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from headrace.engine.fake_engine import FakeDecodeEngine
from headrace.engine.fake_text import expected_output, expected_prompt_logprobs
from headrace.shared import token_ids
from headrace.shared.prompt_logprobs import unpack_logprobs
from headrace.shared.subjects import Role

from .conftest import STAGES, Pipeline


def expected_text(prompt: str, max_tokens: int, **sampling_params: Any) -> str:
    ids = expected_output(list(prompt.encode()), max_tokens, **sampling_params)
    return bytes(i for i in ids if i < 256).decode()


def events(body: str) -> list[dict[str, Any]]:
    """Return the data of a server-sent event stream, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


async def test_a_completion_goes_through_remote_prefill(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = pipeline.settings.model.served_name
    answer = await client.post(
        "/v1/completions", json={"model": model, "prompt": "hello there", "max_tokens": 200}
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["text"] == expected_text("hello there", 200)
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    timings = record["timings"]
    assert timings["prefill_mode"] == "remote"
    assert set(timings["workers"]) == {"render", "prefill", "decode", "derender"}
    assert timings["num_output_token_ids"] == body["usage"]["completion_tokens"]


async def test_streamed_deltas_joined_are_the_whole_answer(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = {
        "model": pipeline.settings.model.served_name,
        "prompt": "stream it",
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = await client.post("/v1/completions", json=request)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == expected_text("stream it", 100)
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_a_threshold_of_infinity_prefills_locally(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    settings = pipeline.settings
    pipeline.settings = msgspec.structs.replace(
        settings,
        decode=msgspec.structs.replace(settings.decode, local_prefill_threshold=float("inf")),
    )
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = settings.model.served_name
    answer = await client.post(
        "/v1/completions", json={"model": model, "prompt": "hello there", "max_tokens": 200}
    )
    assert answer.json()["choices"][0]["text"] == expected_text("hello there", 200)
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    assert record["timings"]["prefill_mode"] == "local"
    assert "prefill" not in record["timings"]["workers"]


async def test_without_a_prefill_worker_decode_prefills_itself(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    model = pipeline.settings.model.served_name
    answer = await client.post(
        "/v1/completions", json={"model": model, "prompt": "alone", "max_tokens": 50}
    )
    assert answer.json()["choices"][0]["text"] == expected_text("alone", 50)


async def test_a_colocated_engine_needs_no_prefill_worker_and_asks_none_that_is_there(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeted: list[Any] = []

    async def shake_hands(self: Any, params: Any) -> None:
        greeted.append(params)

    monkeypatch.setattr(FakeDecodeEngine, "warm_handshake", shake_hands)
    plain = msgspec.structs.replace(pipeline.settings.decode, colocated=True)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=plain)
    await pipeline.start(Role.PREFILL)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    model = pipeline.settings.model.served_name
    answer = await client.post(
        "/v1/completions", json={"model": model, "prompt": "all by itself", "max_tokens": 50}
    )
    assert answer.json()["choices"][0]["text"] == expected_text("all by itself", 50)
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    assert record["timings"]["prefill_mode"] == "local"
    assert (await client.get("/ready")).json()["models"][model]["prefill"] == "colocated"
    (shown,) = [w for w in (await client.get("/workers")).json()["data"] if w["role"] == "decode"]
    assert shown["is_colocated"]
    assert greeted == []


async def test_n_choices_move_the_kv_once(pipeline: Pipeline, client: httpx.AsyncClient) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = {
        "model": pipeline.settings.model.served_name,
        "prompt": ["one", "two"],
        "max_tokens": 40,
        "n": 3,
        "seed": 7,
    }
    answer = await client.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    texts = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
    assert texts == {
        p * 3 + i: expected_text(prompt, 40, seed=7 + i)
        for p, prompt in enumerate(["one", "two"])
        for i in range(3)
    }
    await pipeline.table.wait_for(
        lambda table: [h.num_prefilled for h in table.ready(Role.PREFILL)] == [2]
    )


def expected_rows(prompt: str, asked: int) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt as the fake answers have them."""
    table = expected_prompt_logprobs(list(prompt.encode()), asked)
    assert table is not None
    pairs = list(zip(token_ids.unpack(table.token_ids), unpack_logprobs(table), strict=True))
    rows = [pairs[start : start + table.width] for start in range(0, len(pairs), table.width)]
    return [None, *({str(i): {"logprob": value} for i, value in reversed(row)} for row in rows)]


@pytest.mark.parametrize("mode", ["remote", "local"])
async def test_logprobs_of_a_prompt_come_from_where_it_is_computed(
    pipeline: Pipeline, client: httpx.AsyncClient, mode: str
) -> None:
    roles = [role for role in STAGES if mode == "remote" or role is not Role.PREFILL]
    await pipeline.start(Role.GATEWAY, *roles)
    request = {
        "model": pipeline.settings.model.served_name,
        "prompt": ["hello there", "and you"],
        "max_tokens": 5,
        "n": 2,
        "prompt_logprobs": 3,
    }
    answer = await client.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    rows = [choice["prompt_logprobs"] for choice in answer.json()["choices"]]
    expected = [expected_rows(prompt, 3) for prompt in request["prompt"]]
    assert rows == [expected[0], expected[0], expected[1], expected[1]]
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    assert record["timings"]["prefill_mode"] == mode


async def test_an_answer_with_more_logprobs_than_a_message_holds_goes_through(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    prompt = "x" * 7000
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = {
        "model": pipeline.settings.model.served_name,
        "prompt": [prompt, prompt],
        "max_tokens": 5,
        "prompt_logprobs": 20,
    }
    answer = await client.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    assert [choice["prompt_logprobs"] for choice in answer.json()["choices"]] == [
        expected_rows(prompt, 20)
    ] * 2


async def test_a_stop_string_ends_the_answer_and_the_generation(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    whole = expected_text("stop here", 1000, ignore_eos=True)
    stop = whole.split(" ")[3]
    request = {
        "model": pipeline.settings.model.served_name,
        "prompt": "stop here",
        "max_tokens": 20_000,
        "ignore_eos": True,
        "stop": [f" {stop}"],
    }
    answer = await client.post("/v1/completions", json=request)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole[: whole.index(f" {stop}")]
    await pipeline.table.wait_for(
        lambda table: all(
            h.num_running == 0 and h.kv_blocks_free == h.kv_blocks_total
            for h in table.ready(Role.DECODE)
        )
    )


async def test_bad_requests_are_refused_and_the_pipeline_serves_on(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = pipeline.settings.model.served_name
    bad: list[tuple[dict[str, Any], int]] = [
        ({"model": model, "prompt": "x", "max_tokens": -1}, 400),
        ({"model": "nobody", "prompt": "x"}, 404),
        ({"model": model, "prompt": "x" * 40_000}, 400),
    ]
    for body, status in bad:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    good = await client.post(
        "/v1/completions", json={"model": model, "prompt": "still here", "max_tokens": 9}
    )
    assert good.json()["choices"][0]["text"] == expected_text("still here", 9)
