"""The OpenAI SDK against the real stack: the same token IDs as one plain engine, over NIXL and without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from ..real_stack import MODEL, Stack
from .conftest import LENGTHS, MAX_TOKENS, TEXT, complete

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_greedy_answers_over_nixl_are_those_of_one_engine(
    stack: Stack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    before = asyncio.run(stack.beat(Role.DECODE))
    answers = [complete(stack, prompt) for prompt in prompts]
    assert answers == expected
    # The engine always computes the last token ID of a prompt itself, for the first one of the answer.
    least = before.num_external_cached_token_ids + sum(length - 1 for length in LENGTHS)

    def has_pulled_all(table: WorkerTable) -> bool:
        return all(d.num_external_cached_token_ids >= least for d in table.ready(Role.DECODE))

    asyncio.run(stack.until(has_pulled_all))
    after = asyncio.run(stack.beat(Role.DECODE))
    assert after.num_external_cached_token_ids <= least + len(LENGTHS)
    assert after.num_prefilled == before.num_prefilled


def test_the_async_client_streams_the_same(
    stack: Stack, prompts: list[list[int]], expected: list[list[int]], model_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)

    async def stream(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        chunks = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"cache_salt": "async"},
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts[:8]))

    texts = asyncio.run(all_at_once())
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected[:8]]


def test_a_chat_streams_what_it_answers_whole(stack: Stack) -> None:
    client = client_of(stack)
    question: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = client.chat.completions.create(**question)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            **question, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_the_record_of_a_request_says_where_its_time_went(stack: Stack) -> None:
    prompt = "A record of its own: " + TEXT * 4
    answer = httpx.post(
        f"{stack.url}/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 3},
        timeout=60,
    )
    timings = stack.get(f"/requests/{answer.headers['x-request-id']}")["timings"]
    assert timings["prefill_mode"] == "remote"
    assert timings["kv_transfer_bytes"] > 0
    assert 0 < timings["kv_transfer_s"] < timings["first_token_s"] <= timings["total_s"]
    assert set(timings["workers"]) == {"render", "prefill", "decode", "derender"}


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 400),
        (b'"text"', 400),
        ({**CHAT, "model": "nobody"}, 404),
        ({**CHAT, "messages": []}, 400),
        ({"model": MODEL}, 400),
        ({**CHAT, "messages": [{"role": "alien", "content": "hi"}]}, 400),
        ({**CHAT, "messages": [{"role": "user", "content": "word " * 5000}]}, 400),
        ({**CHAT, "max_tokens": -1}, 400),
        ({**CHAT, "temperature": "hot"}, 400),
        (b'{"model": "x", "messages": "' + b"x" * 10_000_000 + b'"}', 413),
    ],
    ids=[
        "no_json",
        "no_object",
        "model",
        "empty",
        "none",
        "role",
        "long",
        "negative",
        "type",
        "10mb",
    ],
)
def test_bad_input_is_refused_in_openais_shape_and_the_stack_serves_on(
    stack: Stack, body: Any, status: int
) -> None:
    url = f"{stack.url}/v1/chat/completions"
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = httpx.post(url, headers={"content-type": "application/json"}, timeout=30, **sent)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert error["code"] == status
    good = httpx.post(url, json={**CHAT, "max_tokens": 1}, timeout=30)
    assert good.status_code == 200
