"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.shared.errors import RequestError
from headrace.shared.messages import Chunk, Status, Terminal, Timings
from headrace.shared.openai_errors import error_body
from headrace.shared.worker import status_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a request ended. Every request ends once."""

    request_id: str
    status: Status  #: "ok", "error", "cancelled" or "expired"
    http_status: int  #: what OpenAI's API would answer
    body: bytes  #: JSON: the whole answer, or OpenAI's error body; empty after a stream that ended well
    retry_after_s: float | None = None  #: when to submit anew, in seconds. None: no advice
    timings: Timings = field(default_factory=Timings)  #: where the time went

    @property
    def is_ok(self) -> bool:
        """Whether there is an answer."""
        return self.status == "ok"

    def json(self) -> Any:
        """Return the body's JSON. Raises: ValueError when there is none, as after a stream."""
        if not self.body:
            raise ValueError(f"request {self.request_id} was streamed: its answer is in the parts")
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> str | None:
        """What was wrong, in words. None: nothing."""
        if self.is_ok:
            return None
        try:
            return str(self.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return f"request {self.request_id} ended {self.status}"

    @classmethod
    def of_terminal(cls, terminal: Terminal) -> Result:
        """Return what a terminal says."""
        return cls(
            request_id=terminal.request_id,
            status=terminal.status,
            http_status=terminal.http_status,
            body=terminal.body,
            retry_after_s=terminal.retry_after_s,
            timings=terminal.timings,
        )

    @classmethod
    def of_error(cls, request_id: str, error: RequestError) -> Result:
        """Return the result of a request that was not accepted."""
        return cls(
            request_id=request_id,
            status=status_of(error),
            http_status=error.http_status,
            body=error_body(error),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a streamed answer."""

    seq: int  #: counts the parts from 0; the next one is `seq + 1`
    chunks: tuple[bytes, ...]  #: OpenAI's chunk objects as JSON, in order

    def json(self) -> list[Any]:
        """Return the chunks, decoded."""
        return [msgspec.json.decode(chunk) for chunk in self.chunks]

    @classmethod
    def of_chunk(cls, chunk: Chunk) -> Part:
        """Return what a message brings."""
        return cls(seq=chunk.seq, chunks=chunk.chunks)
