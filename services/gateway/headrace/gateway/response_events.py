"""The events of a stored response, numbered as OpenAI numbers them."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.response_object import (
    StoredResponse,
    dressed,
    failed_response,
    queued_response,
)
from headrace.shared.messages import Chunk

NUM_OPENING = 2
"""A background response is first created, and queued; the pipeline's own events come after these."""


class _Numbered(msgspec.Struct):
    sequence_number: int


class _Code(msgspec.Struct):
    code: int = 500


class _ErrorBody(msgspec.Struct):
    error: _Code


_number_decoder = msgspec.json.Decoder(_Numbered)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


def last_number(record: StoredResponse, chunk: Chunk) -> int:
    """Return the sequence number of a message's last event, as the client sees it."""
    return _number_decoder.decode(chunk.chunks[-1]).sequence_number + _shift(record)


def first_number(record: StoredResponse, chunk: Chunk) -> int:
    """Return the sequence number of a message's first event, as the client sees it."""
    return _number_decoder.decode(chunk.chunks[0]).sequence_number + _shift(record)


def _shift(record: StoredResponse) -> int:
    """The pipeline's first event says that the response was created: that has been said."""
    return NUM_OPENING - 1 if record.background else 0


class ResponseEvents:
    """Each event has its type, its number, and that number as its ID; there is no `[DONE]`."""

    def __init__(
        self,
        record: StoredResponse,
        fields: dict[str, Any],
        *,
        after: int = -1,
        last: int | None = None,
    ) -> None:
        """`after`: the last event that the client has; `last`: the last one before the first message."""
        self._record = record
        self._fields = fields
        self._after = after
        opened = NUM_OPENING - 1 if record.background else -1
        self._last = opened if last is None else last

    def opening(self) -> bytes:
        if not self._record.background:
            return b""
        queued = queued_response(self._record, self._fields)
        names = ("response.created", "response.queued")
        return b"".join(
            self._event(number, name, {"response": queued}) for number, name in enumerate(names)
        )

    def chunk(self, chunk: Chunk) -> bytes:
        return b"".join(self._shown(data) for data in chunk.chunks)

    def error(self, body: bytes) -> bytes:
        code = _error_decoder.decode(body).error.code
        failed = failed_response(self._record, self._fields, code, body)
        self._last += 1
        return self._event(self._last, "response.failed", {"response": failed})

    def end(self) -> bytes:
        return b""

    def _shown(self, data: bytes) -> bytes:
        event: dict[str, Any] = msgspec.json.decode(data)
        number = event["sequence_number"] + _shift(self._record)
        self._last = max(self._last, number)
        name: str = event["type"]
        if self._record.background and name == "response.created":
            return b""
        if isinstance(event.get("response"), dict):
            event["response"] = dressed(self._record, event["response"])
            if name == "response.completed" and event["response"]["status"] == "incomplete":
                name = "response.incomplete"
        return self._event(number, name, event)

    def _event(self, number: int, name: str, fields: dict[str, Any]) -> bytes:
        if number <= self._after:
            return b""
        event = fields | {"type": name, "sequence_number": number}
        head = f"id: {number}\nevent: {name}\ndata: ".encode()
        return head + msgspec.json.encode(event) + b"\n\n"
