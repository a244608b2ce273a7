"""Answer messages as server-sent events; which form they have is the endpoint's."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.shared.messages import Chunk, Endpoint

DONE = b"data: [DONE]\n\n"


class Events(Protocol):
    """The events of one answer, in order."""

    def opening(self) -> bytes:
        """Return the events that come before all messages."""
        ...

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one message."""
        ...

    def error(self, body: bytes) -> bytes:
        """Return the event of an error after the first byte; `body` is OpenAI's error body."""
        ...

    def end(self) -> bytes:
        """Return what ends the answer, well or not."""
        ...


def events_of(endpoint: Endpoint) -> Events:
    """Return the form of an endpoint's events, for one answer."""
    return TypedEvents() if endpoint == "responses" else DataEvents()


class DataEvents:
    """Chunks as data, then `[DONE]`."""

    def opening(self) -> bytes:
        return b""

    def chunk(self, chunk: Chunk) -> bytes:
        return b"".join(b"data: " + data + b"\n\n" for data in chunk.chunks)

    def error(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\n"

    def end(self) -> bytes:
        return DONE


class _Typed(msgspec.Struct):
    type: str


class _Error(msgspec.Struct):
    message: str
    type: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_typed_decoder = msgspec.json.Decoder(_Typed)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class TypedEvents:
    """Each chunk names its event: the form of `/v1/responses`, which has no `[DONE]`."""

    def __init__(self) -> None:
        self._num_sent = 0

    def opening(self) -> bytes:
        return b""

    def chunk(self, chunk: Chunk) -> bytes:
        return b"".join(self._event(data) for data in chunk.chunks)

    def error(self, body: bytes) -> bytes:
        """Return OpenAI's `error` event, numbered after those that were sent."""
        error = _error_decoder.decode(body).error
        event = {
            "type": "error",
            "code": error.type,
            "message": error.message,
            "param": error.param,
            "sequence_number": self._num_sent,
        }
        return self._event(msgspec.json.encode(event))

    def end(self) -> bytes:
        return b""

    def _event(self, data: bytes) -> bytes:
        self._num_sent += 1
        name = _typed_decoder.decode(data).type.encode()
        return b"event: " + name + b"\ndata: " + data + b"\n\n"
