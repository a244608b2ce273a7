"""One call from its acceptance to its end: submits it, and sees to it that it ends once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from headrace.gateway.call import Call, Order
from headrace.gateway.errors import DuplicateRequestError, UnavailableError
from headrace.gateway.farewell import Farewell
from headrace.gateway.link import Link
from headrace.gateway.models import resolve_model
from headrace.gateway.pace import Pace
from headrace.gateway.recent import Recent, Record
from headrace.gateway.submitting import publish
from headrace.shared import metrics, spans, subjects, wire
from headrace.shared.answer import Answer, Replay
from headrace.shared.cancels import Cancels
from headrace.shared.errors import (
    BadRequestError,
    BrokerError,
    ExpiredError,
    MalformedMessageError,
)
from headrace.shared.messages import Cancel, Status
from headrace.shared.tracing import OFF, Tracer

if TYPE_CHECKING:
    from headrace.shared.broker import Received

DRAINING_RETRY_AFTER_S = 5.0
CANCELLED = "by its caller"


class Handler:
    """Opens and closes calls. Knows nothing of HTTP."""

    def __init__(
        self,
        link: Link,
        *,
        instance: str,
        deadline_s: float,
        pace: Pace,
        tracer: Tracer = OFF,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._instance = instance
        self._deadline_s = deadline_s
        self._pace = pace
        self._tracer = tracer
        self._clock = clock
        self._farewell = Farewell(link, cancel_interval_s=pace.cancel_interval_s)
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.recent = Recent()
        self.cancels = Cancels()
        self.is_draining = False

    @property
    def num_running(self) -> int:
        """How many clients wait."""
        return len(self._calls)

    def check_open(self) -> None:
        """Raises: UnavailableError when the gateway takes nothing new."""
        if self.is_draining:
            raise _draining()

    async def open(self, order: Order) -> Call:
        """Submit a request; the caller must `close` the call.

        Raises: RequestError when it is not accepted.
        """
        self.check_open()
        try:
            model = resolve_model(self._link.workers, order.model)
            if self.recent.get(order.tenant, order.request_id) is not None:
                raise _duplicate(order.request_id)
            call = self._new_call(order, model)
            self.recent.add(call.record)
            try:
                async with asyncio.timeout_at(call.wait_until):
                    await self._submit(call, order)
            except TimeoutError:
                self._forget(call)
                raise ExpiredError(
                    "the request is past its deadline; the broker did not take it in time"
                ) from None
            except BaseException:
                self._forget(call)
                raise
        except BrokerError as error:
            raise UnavailableError(f"the request was not accepted: {error}") from error
        return call

    async def resubmit(self, order: Order, *, accepted: float, deadline: float) -> None:
        """Submit a request whose first submitter may have ended before it did; the ID keeps it one request.

        Times are Unix seconds. Raises: RequestError when it is not accepted.
        """
        self.check_open()
        try:
            await publish(
                self._link,
                order,
                model=resolve_model(self._link.workers, order.model),
                accepted=accepted,
                deadline=deadline,
                traceparent=order.traceparent,
                reader=None,
                now=self._clock(),
            )
        except BrokerError as error:
            raise UnavailableError(f"the request was not accepted: {error}") from error

    async def attach(
        self,
        order: Order,
        model: str,
        *,
        first_seq: int = 0,
        given: Mapping[int, int] | None = None,
    ) -> Call:
        """Read the answer of a request that somebody has submitted; the caller must `close` the call.

        `first_seq`, `given`: as `Answer` has them. Raises: UnavailableError.
        """
        call = self._new_call(order, model, first_seq=first_seq, given=given)
        try:
            await self._listen(call)
        except BrokerError as error:
            self._drop(call)
            raise UnavailableError(f"the answer can't be read: {error}") from error
        except BaseException:
            self._drop(call)
            raise
        call.answer.reread()
        return call

    def leave(self, call: Call) -> None:
        """Nobody waits for the answer here; the request goes on."""
        self._forget(call)

    def close(
        self, call: Call, status: Status, http_status: int | None, reason: str | None = None
    ) -> None:
        """The client was answered, or is gone. What the pipeline has not ended is cancelled."""
        record, terminal = call.record, call.answer.terminal
        record.status, record.http_status = status, http_status
        record.total_s = self._clock() - record.accepted
        self._drop(call)
        if terminal is not None:
            record.timings = terminal.timings
            self._farewell.leave(call)
        elif call.outlives_client and not call.is_cancelled:
            self._farewell.leave(call)
            if self.recent.get(record.tenant, record.request_id) is record:
                self.recent.discard(record)  # it runs on, and its end is not heard of here
        else:
            metrics.CANCELS_ASKED.labels("gateway").inc()
            self._farewell.see_off(call, reason or status)
        metrics.answered(record.endpoint, http_status, record.total_s, record.first_byte_s)
        spans.answered(
            self._tracer,
            call.traceparent,
            call.client_traceparent,
            request_id=record.request_id,
            model=record.model,
            endpoint=record.endpoint,
            stream=record.stream,
            start=record.accepted,
            end=record.accepted + record.total_s,
            first_byte_s=record.first_byte_s,
            http_status=http_status,
            status=status,
        )
        call.log_end(reason)

    async def cancel(self, tenant: str, request_id: str) -> Status | Literal["cancelling"]:
        """Stop a tenant's request, whoever holds it, and return what is known of it then.

        `cancelling`: it is not one of this gateway's; whether there is such a request, nobody here knows.
        Raises: BadRequestError for what can't be a request ID, UnavailableError.
        """
        record = self.recent.get(tenant, request_id)
        if record is not None and record.status != "running":
            return record.status
        try:
            subject = subjects.cancel(tenant, request_id)
            cancel = Cancel(request_id=request_id, tenant=tenant, reason=CANCELLED)
            await self._link.broker.publish(subject, wire.encode(cancel))
        except MalformedMessageError as error:
            raise BadRequestError(str(error), param="request_id") from None
        except BrokerError as error:
            raise UnavailableError(f"the request was not cancelled: {error}") from error
        if record is None:
            metrics.CANCELS_ASKED.labels("api").inc()
            return "cancelling"
        for call in [call for call in self._calls if call.record is record]:
            call.cancel(CANCELLED)
        return "cancelled"

    def reread_all(self) -> None:
        """The connection was away: every answer may have lost messages."""
        for call in self._calls:
            call.answer.reread()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until the running ones end; end them after `timeout_s`."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for call in self._calls:
                call.answer.fail(_draining())

    async def aclose(self) -> None:
        """End what is left to do for the calls that were closed."""
        await self._farewell.aclose()

    def _new_call(
        self,
        order: Order,
        model: str,
        *,
        first_seq: int = 0,
        given: Mapping[int, int] | None = None,
    ) -> Call:
        record = Record(
            request_id=order.request_id,
            tenant=order.tenant,
            model=model,
            endpoint=order.endpoint,
            stream=order.stream,
            accepted=self._clock(),
        )
        answer = Answer(
            subjects.out(order.tenant, order.request_id),
            replay=self._replay_of(order),
            spawn=self._farewell.spawn,
            pace=self._pace,
            first_seq=first_seq,
            given=given,
        )
        grace_s = self._pace.grace_s
        deadline = asyncio.get_running_loop().time() + self._timeout_s(order)
        call = Call(
            record, answer, wait_until=deadline + grace_s, send_until=deadline + 2 * grace_s
        )
        call.client_traceparent = order.traceparent
        call.traceparent = self._tracer.begin(order.traceparent)
        call.outlives_client = order.outlives_client
        self._calls.add(call)
        self.cancels.watch(order.tenant, order.request_id, call.cancel)
        self._idle.clear()
        return call

    def _timeout_s(self, order: Order) -> float:
        return self._deadline_s if order.timeout_s is None else order.timeout_s

    async def _submit(self, call: Call, order: Order) -> None:
        """Listen for the answer, then publish the request; so none of it is missed."""
        broker, record = self._link.broker, call.record
        await self._listen(call)
        if order.is_own_id and await broker.replay(call.answer.subject):
            raise _duplicate(order.request_id)
        try:
            is_new = await publish(
                self._link,
                order,
                model=record.model,
                accepted=record.accepted,
                deadline=record.accepted + self._timeout_s(order),
                traceparent=call.traceparent,
                reader=self._instance,
                now=self._clock(),
            )
        except (BrokerError, asyncio.CancelledError):
            self._farewell.cancel(call, "not accepted")  # it may be in the queue all the same
            raise
        if order.is_own_id and not is_new:
            raise _duplicate(order.request_id)

    async def _listen(self, call: Call) -> None:
        record = call.record

        def receive(received: Received) -> None:
            if record.first_byte_s is None:
                record.first_byte_s = self._clock() - record.accepted
            call.answer.receive(received)

        call.subscription = await self._link.broker.subscribe(
            call.answer.subject, receive, is_confirmed=False
        )

    async def _replay(self, subject: str) -> list[Received]:
        return await self._link.broker.replay(subject)

    def _replay_of(self, order: Order) -> Replay:
        """Return what reads a kept answer: its end outlives the rest of it, and the broker."""
        if not order.outlives_client:
            return self._replay

        async def replay(subject: str) -> list[Received]:
            found = await self._replay(subject)
            end = await self._link.broker.last(subjects.res(order.tenant, order.request_id))
            return found if end is None else [*found, end]

        return replay

    def _forget(self, call: Call) -> None:
        self.recent.discard(call.record)
        self._drop(call)
        self._farewell.leave(call)

    def _drop(self, call: Call) -> None:
        self._calls.discard(call)
        call.answer.close()
        self.cancels.unwatch(call.record.tenant, call.record.request_id, call.cancel)
        if not self._calls:
            self._idle.set()


def _draining() -> UnavailableError:
    return UnavailableError(
        "this gateway is shutting down; try again", retry_after_s=DRAINING_RETRY_AFTER_S
    )


def _duplicate(request_id: str) -> DuplicateRequestError:
    return DuplicateRequestError(
        f"the request ID {request_id!r} was used before; send another one in X-Request-Id, or none"
    )
