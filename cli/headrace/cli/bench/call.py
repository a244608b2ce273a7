"""One request to an OpenAI-compatible server, measured chunk by chunk."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec

from headrace.cli.bench.measures import Measured
from headrace.cli.bench.prompts import Ask

REQUEST_ID_HEADER = "x-request-id"


class Caller:
    """Sends asks to one server."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, *, reads_records: bool, extra: dict[str, Any]
    ) -> None:
        """`reads_records`: ask the server for headrace's record of each request; `extra` goes into each body."""
        self._client = client
        self.model = model
        self._reads_records = reads_records
        self._extra = extra

    async def ask(self, ask: Ask) -> list[Measured]:
        """Hold a conversation, a turn after the other; return what was measured of each."""
        said: Any = None
        measured = []
        for turn in ask.turns:
            said = _behind(said, turn)
            one, answer = await self._turn(said, ask.num_output_token_ids)
            measured.append(one)
            if one.error:
                break
            said = _behind(said, answer)
        return measured

    async def _turn(self, said: Any, num_output: int) -> tuple[Measured, Any]:
        is_chat = isinstance(said, list) and bool(said) and isinstance(said[0], dict)
        one = Measured(start=time.perf_counter())
        if isinstance(said, list) and not is_chat:
            one.num_prompt_token_ids = len(said)
        body = {
            "model": self.model,
            ("messages" if is_chat else "prompt"): said,
            "max_tokens": num_output,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
            **self._extra,
        }
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        words: list[str] = []
        try:
            async with self._client.stream("POST", path, json=body) as answer:
                one.request_id = answer.headers.get(REQUEST_ID_HEADER, "")
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    one.error = f"HTTP {answer.status_code}: {text[:200]}"
                else:
                    await _read(answer, one, words)
        except httpx.HTTPError as error:
            one.error = type(error).__name__
        if self._reads_records and one.request_id and not one.error:
            one.stages = await self._record(one.request_id)
        text = "".join(words)
        return one, [{"role": "assistant", "content": text}] if is_chat else text

    async def _record(self, request_id: str) -> dict[str, Any] | None:
        answer = await self._client.get(f"/requests/{request_id}")
        if answer.status_code != httpx.codes.OK:
            return None
        timings: dict[str, Any] | None = answer.json().get("timings")
        return timings


async def _read(answer: httpx.Response, one: Measured, words: list[str]) -> None:
    last = one.start
    is_done = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data == "[DONE]":
            is_done = True
            break
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            one.error = f"in the stream: {chunk['error'].get('message', '')[:200]}"
            return
        usage = chunk.get("usage")
        if usage:
            one.num_prompt_token_ids = usage["prompt_tokens"]
            one.num_output_token_ids = usage["completion_tokens"]
        choices = chunk.get("choices") or []
        if not choices or (one.ttft_s is None and _only_opens(choices[0])):
            continue
        words.append(_text(choices[0]))
        if one.ttft_s is None:
            one.ttft_s = now - one.start
        else:
            one.itls_s.append(now - last)
        last = now
        one.e2e_s = now - one.start
    if not is_done or one.ttft_s is None:
        one.error = "the stream ended without [DONE]" if not is_done else "no token ID came"


def _only_opens(choice: dict[str, Any]) -> bool:
    """Whether a chunk names the role of a chat's answer, before there is a token ID."""
    return "role" in (choice.get("delta") or {}) and not _text(choice)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or delta.get("reasoning") or "")


def _behind(said: Any, more: Any) -> Any:
    """Return a conversation with one thing more; an answer's text behind token IDs is left out."""
    if said is None:
        return more
    if isinstance(said, list) and isinstance(more, str):
        return said
    if isinstance(said, str) and isinstance(more, str):
        return said + more
    return [*said, *more]
