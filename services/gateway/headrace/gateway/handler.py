"""One call from its acceptance to its end: submits it, and sees to it that it ends once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from headrace.gateway.call import Call, Order
from headrace.gateway.errors import DuplicateRequestError, UnavailableError
from headrace.gateway.farewell import Farewell
from headrace.gateway.link import Link
from headrace.gateway.models import resolve_model
from headrace.gateway.pace import Pace
from headrace.gateway.recent import Recent, Record
from headrace.shared import subjects, wire
from headrace.shared.answer import Answer
from headrace.shared.cancels import Cancels
from headrace.shared.deadlines import kept_s
from headrace.shared.errors import (
    BadRequestError,
    BrokerError,
    ExpiredError,
    MalformedMessageError,
)
from headrace.shared.messages import Cancel, Status
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._instance = instance
        self._deadline_s = deadline_s
        self._pace = pace
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

    def close(
        self, call: Call, status: Status, http_status: int | None, reason: str | None = None
    ) -> None:
        """The client was answered, or is gone. What the pipeline has not ended is cancelled."""
        record, terminal = call.record, call.answer.terminal
        record.status, record.http_status = status, http_status
        record.total_s = self._clock() - record.accepted
        self._drop(call)
        if terminal is None:
            self._farewell.see_off(call, reason or status)
        else:
            record.timings = terminal.timings
            self._farewell.leave(call)
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

    def _new_call(self, order: Order, model: str) -> Call:
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
            replay=self._replay,
            spawn=self._farewell.spawn,
            pace=self._pace,
        )
        grace_s = self._pace.grace_s
        deadline = asyncio.get_running_loop().time() + self._timeout_s(order)
        call = Call(
            record, answer, wait_until=deadline + grace_s, send_until=deadline + 2 * grace_s
        )
        self.recent.add(record)
        self._calls.add(call)
        self.cancels.watch(order.tenant, order.request_id, call.cancel)
        self._idle.clear()
        return call

    def _timeout_s(self, order: Order) -> float:
        return self._deadline_s if order.timeout_s is None else order.timeout_s

    async def _submit(self, call: Call, order: Order) -> None:
        """Listen for the answer, then publish the request; so none of it is missed."""
        broker, record = self._link.broker, call.record

        def receive(received: Received) -> None:
            if record.first_byte_s is None:
                record.first_byte_s = self._clock() - record.accepted
            call.answer.receive(received)

        call.subscription = await broker.subscribe(call.answer.subject, receive)
        if order.is_own_id and await broker.replay(call.answer.subject):
            raise _duplicate(order.request_id)
        submission = Submission(
            request_id=record.request_id,
            tenant=record.tenant,
            slug=subjects.model_slug(record.model),
            lane=Lane.RT,
            endpoint=order.endpoint,
            deadline=record.accepted + self._timeout_s(order),
            accepted=record.accepted,
            body=order.body,
            traceparent=order.traceparent,
            is_own_id=order.is_own_id,
            reader=self._instance,
        )
        try:
            is_new = await broker.publish_durable(
                submission.subject,
                submission.body,
                message_id=submission.message_id,
                headers=submission.to_headers(),
                kept_s=kept_s(submission.lane, submission.deadline, self._clock()),
            )
        except (BrokerError, asyncio.CancelledError):
            self._farewell.cancel(call, "not accepted")  # it may be in the queue all the same
            raise
        if order.is_own_id and not is_new:
            raise _duplicate(order.request_id)

    async def _replay(self, subject: str) -> list[Received]:
        return await self._link.broker.replay(subject)

    def _forget(self, call: Call) -> None:
        self.recent.discard(call.record)
        self._drop(call)
        self._farewell.leave(call)

    def _drop(self, call: Call) -> None:
        self._calls.discard(call)
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
