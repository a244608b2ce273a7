"""Reading an answer again, or from its middle: what is kept of it first, then what comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.gateway.answering import CallResponse, Form
from headrace.gateway.call import Order
from headrace.gateway.errors import MAX_SHOWN_ID, GoneError, NotFoundError
from headrace.gateway.events import events_of
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import Idempotency
from headrace.gateway.link import Link
from headrace.gateway.numbered_events import LAST_EVENT_ID, NumberedEvents, Position
from headrace.gateway.response_events import ResponseEvents, first_number, last_number
from headrace.gateway.response_object import StoredResponse
from headrace.gateway.response_store import ResponseStore, end_of
from headrace.shared import subjects
from headrace.shared.broker import Received
from headrace.shared.errors import BadRequestError, MalformedMessageError
from headrace.shared.messages import Chunk, Endpoint, Takeover, Terminal
from headrace.shared.owners import Owners, message_of

SENDING_S = 60.0  # for an answer that has ended already, to a client that is slow

GONE = "is kept for 15 minutes, and not any more"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A request whose answer is to be read."""

    tenant: str
    request_id: str
    endpoint: Endpoint
    model: str
    stream: bool
    deadline: float  #: Unix seconds


@dataclass(frozen=True, slots=True)
class Kept:
    """What is there of an answer."""

    chunks: list[Chunk]  #: by number; the earliest may be gone
    terminal: Terminal | None  #: None: it has not ended, or that is kept no longer

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there."""
        return not self.chunks and self.terminal is None

    def check_from(self, seq: int) -> None:
        """Raises: GoneError when the answer can't be read from this message on."""
        is_gone = self.chunks[0].seq > seq if self.chunks else False
        if not self.chunks and self.terminal is not None and self.terminal.status == "ok":
            is_gone = self.terminal.seq > seq
        if is_gone:
            raise GoneError(f"this part of the stream {GONE}")

    def check_has(self, position: Position) -> None:
        """Raises: BadRequestError for an event behind the end; before the end, what is there may still grow."""
        end = self.terminal
        if end is not None and end.status == "ok" and position.seq >= end.seq:
            raise BadRequestError(
                f"{LAST_EVENT_ID}: this answer has no such event; it has messages up to {end.seq - 1}",
                param=LAST_EVENT_ID,
            )


class Readings:
    """Opens answers that somebody has asked for before. Every method raises BrokerError without a broker."""

    def __init__(
        self,
        link: Link,
        handler: Handler,
        idempotency: Idempotency,
        responses: ResponseStore,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`deadline_s`: of a request of which nobody says when it ends."""
        self._link = link
        self._handler = handler
        self._idempotency = idempotency
        self._responses = responses
        self._deadline_s = deadline_s
        self._clock = clock

    async def events(self, tenant: str, request_id: str, after: str | None) -> CallResponse:
        """Return the answer of a request behind the event `after`; None: from its beginning.

        Raises: NotFoundError, GoneError, BadRequestError.
        """
        try:
            subjects.check_token(request_id, "request_id")
        except MalformedMessageError:
            raise _unknown(request_id) from None
        if request_id.startswith("resp_"):
            record = await self._responses.get(tenant, request_id)
            return await self.response(tenant, record, event_number(after, LAST_EVENT_ID))
        position = None if after is None else Position.parse(after)
        kept = await self.kept(tenant, request_id)
        target = await self._target(tenant, request_id, kept)
        return await self.resume(target, position, kept=kept)

    async def resume(
        self,
        target: Target,
        after: Position | None,
        *,
        kept: Kept | None = None,
        form: Form | None = None,
    ) -> CallResponse:
        """Return an answer behind an event of it. Raises: GoneError, UnavailableError."""
        if kept is None:
            kept = await self.kept(target.tenant, target.request_id)
        if form is None:
            form = Form(events=NumberedEvents(events_of(target.endpoint), after))
        first_seq = 0 if after is None else after.seq  # its message again: it may hold more events
        if target.stream:
            kept.check_from(first_seq)
            if after is not None:
                kept.check_has(after)
        given = {} if after is None else {after.epoch: after.seq}
        return await self._open(target, kept, form, first_seq=first_seq, given=given)

    async def response(self, tenant: str, record: StoredResponse, after: int) -> CallResponse:
        """Return the events of a stored response behind number `after`.

        Raises: as `resume`; BadRequestError when it is no stream.
        """
        if not record.stream:
            raise BadRequestError(
                "only a response that was created with stream=true can be read as a stream",
                param="stream",
            )
        fields = await self._responses.fields_of(record)
        kept = await self.kept(tenant, record.response_id)
        if kept.terminal is None:
            await self._responses.end_of(tenant, record)  # its time may be over
        first_seq, last = 0, None
        for chunk in kept.chunks:
            first_seq = chunk.seq
            if last_number(record, chunk) > after:
                break
            first_seq, last = chunk.seq + 1, last_number(record, chunk)
        if kept.chunks and first_number(record, kept.chunks[0]) <= after + 1:
            kept.check_from(max(first_seq, kept.chunks[0].seq))
        else:
            kept.check_from(0)
        events = ResponseEvents(record, fields, after=after, last=last)
        form = Form(events=events, starts_at_once=record.background, may_be_over=after >= 0)
        target = Target(
            tenant=tenant,
            request_id=record.response_id,
            endpoint="responses",
            model=record.model,
            stream=True,
            deadline=record.deadline,
        )
        return await self._open(target, kept, form, first_seq=first_seq)

    async def kept(self, tenant: str, request_id: str) -> Kept:
        """Return what is there of an answer; what a later owner has made void is left out."""
        captured = await self._link.broker.replay(subjects.out(tenant, request_id))
        return _kept(captured, await end_of(self._link, tenant, request_id))

    async def _open(
        self,
        target: Target,
        kept: Kept,
        form: Form,
        *,
        first_seq: int,
        given: dict[int, int] | None = None,
    ) -> CallResponse:
        left_s = max(0.0, target.deadline - self._clock())
        order = Order(
            request_id=target.request_id,
            tenant=target.tenant,
            is_own_id=False,
            endpoint=target.endpoint,
            model=target.model,
            stream=target.stream,
            body=b"",
            timeout_s=left_s if kept.terminal is None else max(left_s, SENDING_S),
            outlives_client=True,
        )
        call = await self._handler.attach(order, target.model, first_seq=first_seq, given=given)
        return CallResponse(call, self._handler, form)

    async def _target(self, tenant: str, request_id: str, kept: Kept) -> Target:
        now = self._clock()
        recent = self._handler.recent.get(tenant, request_id)
        known = await self._idempotency.record_of(tenant, request_id)
        endpoint: Endpoint = "chat.completions"
        stream, deadline, model = bool(kept.chunks), now + self._deadline_s, ""
        if recent is not None:
            endpoint, stream, model = recent.endpoint, recent.stream, recent.model
        elif known is not None:
            endpoint, stream, model = known.endpoint, known.stream, known.model
            deadline = known.deadline
        elif kept.is_empty:
            raise _unknown(request_id)
        elif kept.chunks and kept.chunks[0].chunks[0].startswith(b'{"type":"response.'):
            endpoint = "responses"
        return Target(
            tenant=tenant,
            request_id=request_id,
            endpoint=endpoint,
            model=model,
            stream=stream,
            deadline=deadline,
        )


def _kept(captured: list[Received], end: Terminal | None) -> Kept:
    messages = [message for received in captured if (message := message_of(received)) is not None]
    owners = Owners()
    for message in messages:
        if isinstance(message, Takeover):
            owners.take_over(message)
    chunks: dict[int, Chunk] = {}
    for message in messages:
        if isinstance(message, Takeover) or owners.is_void(message):
            continue
        if isinstance(message, Chunk):
            chunks.setdefault(message.seq, message)
        elif end is None:
            end = message
    return Kept([chunks[seq] for seq in sorted(chunks)], end)


def event_number(text: str | None, name: str) -> int:
    """Return the number of the last event that a client has; none is -1. Raises: BadRequestError naming `name`."""
    if text is None:
        return -1
    if not text.isdecimal() or len(text) > 9:
        raise BadRequestError(f"{name} must be the sequence number of an event", param=name)
    return int(text)


def _unknown(request_id: str) -> NotFoundError:
    return NotFoundError(
        f"no request `{request_id[:MAX_SHOWN_ID]}` is known here", param="request_id"
    )
