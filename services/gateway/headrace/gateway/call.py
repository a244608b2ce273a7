"""What a client asks for, and the accepted request whose client waits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace.gateway.recent import Record
from headrace.shared.answer import Answer
from headrace.shared.errors import CancelledRequestError, ExpiredError, RequestError
from headrace.shared.messages import Chunk, Endpoint, Status, Terminal
from headrace.shared.subjects import Lane
from headrace.shared.tracing import trace_id_of

if TYPE_CHECKING:
    from headrace.shared.broker import Subscription

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a client asks for."""

    request_id: str  #: the client's own, or a new one
    tenant: str  #: whose request it is
    is_own_id: bool  #: the client chose `request_id`, so it may have been used before
    endpoint: Endpoint  #: which OpenAI endpoint the body is for
    model: str | None  #: served model name; None: the only one
    stream: bool  #: whether the answer goes out in chunks
    body: bytes  #: the client's own JSON
    timeout_s: float | None = None  #: until the deadline; None: the setting
    traceparent: str | None = None  #: W3C trace context; None: not traced
    lane: Lane = Lane.RT  #: how urgent it is
    keeps_result: bool = False  #: its terminal is kept whatever the lane is
    outlives_client: bool = False  #: it goes on when its client, or this gateway, is gone


class Call:
    """An accepted request whose client waits. Times are of the event loop's clock."""

    def __init__(
        self, record: Record, answer: Answer, *, wait_until: float, send_until: float
    ) -> None:
        self.record = record
        self.answer = answer
        self.wait_until = wait_until  #: when the gateway gives up waiting for the pipeline
        self.send_until = send_until  #: when it gives up on a client that does not read
        self.subscription: Subscription | None = None  #: None: not yet
        self.outlives_client = False  #: it goes on when its client is gone
        self.is_cancelled = False  #: somebody has cancelled the request itself
        self.client_traceparent: str | None = None  #: the trace context that its client sent
        self.traceparent: str | None = None  #: its own, which its stages' spans lie under

    async def next(self) -> list[Chunk | Terminal]:
        """Wait for the next messages, in order; a terminal is the last one.

        Raises: CancelledRequestError, ExpiredError, UnavailableError or AnswerLostError.
        """
        return await self.answer.next(self.wait_until)

    async def terminal(self) -> Terminal:
        """Wait for the terminal. Raises: as `next`."""
        while True:
            last = (await self.next())[-1]
            if isinstance(last, Terminal):
                return last

    def cancel(self, reason: str) -> None:
        """The request was cancelled: its client need not wait until the pipeline has ended it."""
        self.is_cancelled = True
        self.answer.fail(CancelledRequestError(f"the request was cancelled: {reason}"))

    def disconnect(self) -> None:
        """The client is gone."""
        self.answer.fail(CancelledRequestError("the client disconnected"))

    def log_end(self, reason: str | None) -> None:
        """Write the one line of this request."""
        record = self.record
        trace_id = trace_id_of(self.traceparent)
        logger.info(
            "request %s done: %s, HTTP %s, %.3f s",
            record.request_id,
            record.status,
            record.http_status,
            record.total_s,
            extra=msgspec.to_builtins(record)
            | {"action": "request_done", "reason": reason}
            | ({} if trace_id is None else {"trace_id": trace_id}),
        )


def status_of(error: RequestError) -> Status:
    """Return how a request ends that the gateway ends with `error`."""
    if isinstance(error, CancelledRequestError):
        return "cancelled"
    return "expired" if isinstance(error, ExpiredError) else "error"
