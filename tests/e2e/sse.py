"""Answers read off the socket, and checked so strictly that no client's parser could stumble over them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = "[DONE]"
LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})


class FramingError(Exception):
    """The bytes are not what the endpoint promises; the message shows them."""


@dataclass(frozen=True)
class RawAnswer:
    """One HTTP answer, to the end of its connection."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    name: str | None
    data: str


async def ask(
    url: str,
    path: str,
    body: Any,
    *,
    headers: dict[str, str] | None = None,
    on_first: Callable[[], Awaitable[None]] | None = None,
) -> RawAnswer:
    """Post `body` and read all that comes back; `on_first` is awaited when the answer has begun."""
    host = urlsplit(url).netloc
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        first = await reader.read(1)
        if on_first is not None:
            await on_first()
        return answer_of(head, first + await reader.read())
    finally:
        writer.close()
        await writer.wait_closed()


def answer_of(head: str, rest: bytes) -> RawAnswer:
    """Return the answer. Raises: FramingError when more or less follows the head than it announces."""
    status, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = dechunked(rest)
    elif headers.get("content-length") != str(len(rest)):
        _refuse(f"a body of {len(rest)} bytes, announced as {headers.get('content-length')}", rest)
    return RawAnswer(int(status.split(" ")[1]), headers, rest)


def dechunked(raw: bytes) -> bytes:
    """Return the body of a chunked answer. Raises: FramingError when anything follows its last chunk."""
    body = bytearray()
    while True:
        size, found, raw = raw.partition(b"\r\n")
        if not found:
            _refuse("a chunk without a size", size)
        length = int(size, 16)
        if raw[length : length + 2] != b"\r\n":
            _refuse(f"a chunk that is not {length} bytes long", raw)
        if length == 0:
            if raw != b"\r\n":
                _refuse("bytes after the last chunk", raw)
            return bytes(body)
        body += raw[:length]
        raw = raw[length + 2 :]


def events_of(body: bytes) -> list[Event]:
    """Return the events. Raises: FramingError unless each is `data: …`, or `event: …` above it."""
    if b"\r" in body:
        _refuse("a carriage return", body)
    text = body.decode()
    if not text.endswith("\n\n"):
        _refuse("no blank line at the end", body[-80:])
    return [_event(block) for block in text.removesuffix("\n\n").split("\n\n")]


def _event(block: str) -> Event:
    fields = [line.partition(": ") for line in block.split("\n")]
    if [field for field, _, _ in fields] not in (["data"], ["event", "data"]):
        _refuse("other lines than `event` and `data`, in this order and once each", block)
    for _, _, value in fields:
        if not value or value != value.strip():
            _refuse("a blank field, or blanks around one", block)
    return Event(fields[0][2] if len(fields) == 2 else None, fields[-1][2])


def chunks_of(answer: RawAnswer) -> list[dict[str, Any]]:
    """Return the chunks of a chat or a completion; a last one may be an error.

    Raises: FramingError unless all have one identity, and `[DONE]` stands at the end, once.
    """
    events = _stream(answer)
    if any(event.name is not None for event in events):
        _refuse("a named event", answer.body)
    *before, last = [event.data for event in events]
    if last != DONE or DONE in before:
        _refuse("[DONE] not at the end, or not once", answer.body)
    chunks = [_object(data) for data in before]
    if any("error" in chunk for chunk in chunks[:-1]):
        _refuse("a chunk after an error", answer.body)
    plain = [chunk for chunk in chunks if "error" not in chunk]
    identities = {
        tuple(chunk.get(k) for k in ("id", "object", "created", "model")) for chunk in plain
    }
    if len(identities) != 1 or None in identities.pop():
        _refuse("chunks that do not share id, object, created and model", answer.body)
    return chunks


def typed_events_of(answer: RawAnswer) -> list[dict[str, Any]]:
    """Return the events of a response.

    Raises: FramingError unless they are named by type, numbered without a gap, and end once.
    """
    found: list[dict[str, Any]] = []
    for number, event in enumerate(_stream(answer)):
        data = _object(event.data)
        if event.name is None or event.name != data.get("type"):
            _refuse(f"an event called {event.name}", event.data)
        if data.get("sequence_number") != number:
            _refuse(f"another sequence_number than {number}", event.data)
        found.append(data)
    types = [data["type"] for data in found]
    if types[0] != "response.created" or types.count("response.created") != 1:
        _refuse(f"other beginnings than response.created, once: {types}", answer.body)
    if types[-1] not in LAST_EVENTS or LAST_EVENTS.intersection(types[:-1]):
        _refuse(f"other ends than one of {sorted(LAST_EVENTS)}, once: {types}", answer.body)
    return found


def error_of(answer: RawAnswer) -> dict[str, Any]:
    """Return the error of an answer that never began. Raises: FramingError unless it has OpenAI's shape."""
    content_type = answer.headers.get("content-type")
    if answer.status < 400 or content_type != "application/json":
        _refuse(f"status {answer.status} with {content_type} for an error", answer.body)
    body = _object(answer.body.decode())
    if set(body) != {"error"}:
        _refuse("other keys than `error`", answer.body)
    return checked_error(body["error"], answer.status)


def checked_error(error: Any, status: int) -> dict[str, Any]:
    """Return OpenAI's error object. Raises: FramingError unless it is whole, and its code the status."""
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        _refuse("no object of message, type, param and code", error)
    if not error["message"] or not error["type"] or error["code"] != status:
        _refuse(f"an error without a word, or with another code than {status}", error)
    return error


def _stream(answer: RawAnswer) -> list[Event]:
    content_type = answer.headers.get("content-type")
    if answer.status != 200 or content_type != EVENT_STREAM:
        _refuse(f"status {answer.status} with {content_type} for a stream", answer.body)
    return events_of(answer.body)


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_number)
    except ValueError as error:
        raise FramingError(f"no JSON ({error}): {data[:200]!r}") from None
    if not isinstance(value, dict):
        _refuse("JSON that is no object", data)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key twice among {[key for key, _ in pairs]}")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _refuse(what: str, shown: Any) -> NoReturn:
    raise FramingError(f"{what}: {shown[:300] if isinstance(shown, str | bytes) else shown!r}")
