"""`headrace demo`: one question through a stack of one's own, and where its time went."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from headrace.cli import timings, up
from headrace.cli.logs import LogFormat, LogLevel
from headrace.shared.errors import HeadraceError
from headrace.shared.messages import Timings
from headrace.shared.settings import Settings

#: unless the command line says otherwise: any free port, no API key needed, and every prefill remote
PRESETS = {
    "gateway.port": "0",
    "gateway.api_keys_file": "",
    "gateway.api_keys": "",
    "decode.local_prefill_threshold": "0",
}
REQUEST_ID_HEADER = "X-Request-Id"
MAX_TOKENS = 64
ANSWER_TIMEOUT_S = 300.0
RECORD_TRIES = 50
RECORD_INTERVAL_S = 0.1

# some hundred token IDs, so that a KV cache worth moving is moved
INSTRUCTIONS = """\
You are a helpful assistant who answers questions for the visitors of a small town library.
Answer in plain English. Give the answer first, in one short sentence, and add one more sentence \
only when it helps the visitor to understand the answer. Name people, places and dates in full. \
Use the metric system for lengths, weights and temperatures. Write numbers below ten as words. \
Do not repeat the question, do not apologise, and do not speak about yourself.
When a question is about a country, think of its capital, its largest cities, its rivers and its \
neighbours. When a question is about a person, think of when the person lived and what the \
person is known for. When a question is about an animal or a plant, think of where it lives, how \
large it grows and what it needs. When a question is about a word, say what it means and give \
one short example of how it is used. When a question is about a book, name its author and the \
year in which it was first printed. When a question is about the library itself, remember that \
it is open from nine in the morning until six in the evening, from Monday to Saturday, that \
every visitor may borrow ten books for four weeks, and that the reading room is on the first \
floor, next to the collection of maps.
If a question can be understood in two ways, choose the way that most people would choose. If \
you do not know the answer, say so in one sentence. A wrong answer is worse than none.
"""


class DemoError(HeadraceError):
    """The demo's question was not answered."""


def demo(settings: Settings, question: str, log_format: LogFormat, log_level: LogLevel) -> int:
    """Start a stack, ask `question`, print answer and table, drain; return the exit code."""

    async def session(url: str, resolved: Settings) -> None:
        await ask(url, resolved.model.served_name, question)

    return up.run_stack(
        settings, session, store_dir=None, log_format=log_format, log_level=log_level
    )


async def ask(url: str, model: str, question: str) -> None:
    """Ask one question and print what comes. Raises: DemoError when no whole answer comes."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
        _print(f"\n> {question}\n\n")
        body = request_body(model, question)
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for chunk in chunks(answer):
                    _print(text_of(chunk))
            _print("\n\n")
            found = await fetch_timings(client, answer.headers[REQUEST_ID_HEADER])
        except httpx.HTTPError as error:
            raise DemoError(f"{url} did not answer: {error!r}") from error
    _print(f"Where the time went\n\n{timings.table(found)}\n\n")
    _print(f"{timings.where_prefilled(found)}\n")


def request_body(model: str, question: str) -> dict[str, Any]:
    """Return the chat completion that is asked for."""
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": question},
        ],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }


async def chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield OpenAI's chunk objects until `[DONE]`.

    Raises: DemoError for an error, or a stream that is cut.
    """
    if answer.status_code != httpx.codes.OK:
        text = (await answer.aread()).decode(errors="replace")
        raise DemoError(f"the gateway answered {answer.status_code}: {text}")
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            raise DemoError(f"the stream ended with an error: {chunk['error']}")
        yield chunk
    raise DemoError("the stream ended without [DONE]")


def text_of(chunk: dict[str, Any]) -> str:
    """Return the text that a chunk adds to the first choice, reasoning included."""
    for choice in chunk.get("choices", []):
        delta = choice.get("delta", {})
        return str(delta.get("reasoning") or "") + str(delta.get("content") or "")
    return ""


async def fetch_timings(client: httpx.AsyncClient, request_id: str) -> Timings:
    """Return where the request's time went.

    The record is complete a moment after the last chunk. Raises: DemoError when it does not come.
    """
    for _ in range(RECORD_TRIES):
        answer = await client.get(f"/requests/{request_id}")
        if answer.status_code == httpx.codes.OK:
            record = answer.json()
            if record.get("status") != "running":
                return msgspec.convert(record.get("timings", {}), Timings)
        await asyncio.sleep(RECORD_INTERVAL_S)
    raise DemoError(f"the gateway has no finished record of request {request_id}")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
