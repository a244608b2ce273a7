"""Server-sent events with IDs, so that a client that was cut off can go on where it was."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from headrace.gateway.events import Events
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import Chunk

LAST_EVENT_ID = "Last-Event-ID"
END_ID = "end"
"""Of the last event: nothing comes after it."""
_ID = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Position:
    """An event of an answer: the owner who made it, its message, its place in that."""

    epoch: int
    seq: int
    index: int

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return what an event's ID says. Raises: BadRequestError when it is none."""
        found = _ID.fullmatch(text)
        if found is None:
            raise BadRequestError(
                f"{LAST_EVENT_ID} must be the `id` of an event of this answer, as 1.0.0",
                param=LAST_EVENT_ID,
            )
        return cls(*map(int, found.groups()))


class NumberedEvents:
    """The events of another form, each with its ID; what the client has is left out."""

    def __init__(self, events: Events, after: Position | None = None) -> None:
        self._events = events
        self._after = after

    def opening(self) -> bytes:
        return self._events.opening()

    def chunk(self, chunk: Chunk) -> bytes:
        parts = []
        for index, data in enumerate(chunk.chunks):
            one = self._events.chunk(msgspec.structs.replace(chunk, chunks=(data,)))
            if self._after is None or (chunk.seq, index) > (self._after.seq, self._after.index):
                parts.append(f"id: {chunk.epoch}.{chunk.seq}.{index}\n".encode() + one)
        return b"".join(parts)

    def error(self, body: bytes) -> bytes:
        return self._with_end_id(self._events.error(body))

    def end(self) -> bytes:
        return self._with_end_id(self._events.end())

    @staticmethod
    def _with_end_id(event: bytes) -> bytes:
        return f"id: {END_ID}\n".encode() + event if event else b""
