"""The other endpoints through every service, on a real broker, with fake engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from headrace.engine.fake_text import expected_output
from headrace.shared import subjects
from headrace.shared.subjects import Role

from .conftest import STAGES, Pipeline
from .test_flow import events

EOS = 256


async def test_text_and_token_ids_are_asked_of_render(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, Role.RENDER)
    model = pipeline.settings.model.served_name
    answer = await client.post("/tokenize", json={"model": model, "prompt": "hé"})
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["tokens"]
    assert tokens == list("hé".encode())
    answer = await client.post("/detokenize", json={"model": model, "tokens": tokens})
    assert answer.json() == {"prompt": "hé"}


async def test_a_large_question_and_its_answer_go_through(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, Role.RENDER)
    answer = await client.post("/tokenize", json={"prompt": "x" * 5_000_000})
    assert answer.status_code == 200, answer.text
    assert answer.json()["count"] == 5_000_000


@pytest.mark.parametrize("path", ["/v1/completions/render", "/v1/chat/completions/derender"])
async def test_what_the_fake_does_not_know_is_refused_by_name(
    pipeline: Pipeline, client: httpx.AsyncClient, path: str
) -> None:
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DERENDER)
    answer = await client.post(path, json={})
    assert answer.status_code == 400
    assert "is not supported by the fake engine" in answer.json()["error"]["message"]


async def test_when_nobody_listens_the_client_hears_it_at_once(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, Role.DERENDER)
    answer = await client.post("/tokenize", json={"prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "no render worker" in answer.json()["error"]["message"]


async def test_a_worker_that_stops_leaves_questions_to_the_others(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    _, first, _ = await pipeline.start(Role.GATEWAY, Role.RENDER, Role.RENDER)
    await first.drain()
    answers = await asyncio.gather(
        *(client.post("/tokenize", json={"prompt": "x"}) for _ in range(20))
    )
    assert {answer.status_code for answer in answers} == {200}


async def test_a_silent_worker_is_a_504(pipeline: Pipeline, client: httpx.AsyncClient) -> None:
    await pipeline.start(Role.GATEWAY, Role.DERENDER)
    slug = subjects.model_slug(pipeline.settings.model.served_name)
    await pipeline.broker.subscribe(subjects.render_ask(slug), lambda _: None, queue="render")
    answer = await client.post(
        "/tokenize", json={"prompt": "x"}, headers={"X-Request-Timeout": "0.01"}
    )
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == "tokenize was not answered within 0.01 s"


def generate(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    params = {"max_tokens": max_tokens, **more.pop("sampling_params", {})}
    return {"token_ids": list(prompt.encode()), "sampling_params": params, **more}


async def test_token_ids_in_token_ids_out(pipeline: Pipeline, client: httpx.AsyncClient) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    answer = await client.post(
        "/inference/v1/generate",
        json=generate("hello there", 60, sampling_params={"n": 2, "seed": 3}),
    )
    assert answer.status_code == 200, answer.text
    choices = {c["index"]: c["token_ids"] for c in answer.json()["choices"]}
    assert choices == {i: expected_output(list(b"hello there"), 60, seed=3 + i) for i in range(2)}
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    assert record["endpoint"] == "generate"
    assert record["timings"]["prefill_mode"] == "remote"


async def test_token_ids_stream_out(pipeline: Pipeline, client: httpx.AsyncClient) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    body = generate("stream it", 40, stream=True, stream_options={"include_usage": True})
    answer = await client.post("/inference/v1/generate", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"]]
    assert ids == expected_output(list(b"stream it"), 40)
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)


async def test_handles_of_the_kv_cache_are_not_the_clients_to_give(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    body = generate("x", 5, kv_transfer_params={"do_remote_decode": True})
    answer = await client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"


async def test_the_fakes_responses_are_those_of_its_chats(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    messages = [{"role": "user", "content": "hi"}]
    chat = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 9})
    text = chat.json()["choices"][0]["message"]["content"]
    body = {"input": "hi", "max_output_tokens": 9}
    whole = (await client.post("/v1/responses", json=body)).json()
    assert whole["output"][0]["content"][0]["text"] == text
    streamed = await client.post("/v1/responses", json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[:6] == "data: "]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"] == text
