"""What every stage process is made of: a name, a broker, a heartbeat, the cancels it hears, its ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Delivery
from headrace.shared.cancels import Cancels
from headrace.shared.errors import (
    BrokerError,
    CancelledRequestError,
    EngineDeadError,
    ExpiredError,
    RequestError,
    StoppedError,
    WireError,
)
from headrace.shared.messages import DeadLetter, Heartbeat, Status, Terminal, Timings
from headrace.shared.openai_errors import error_body
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.workers import Beacon, WorkerTable

logger = logging.getLogger(__name__)

MAX_DELIVERIES = 5
REDELIVERY_DELAY_S = 1.0
HANDOVER_DELAY_S = 0.1
"""For the takes of a worker that ends to be withdrawn, so that it does not get its own message back."""

State = Literal["starting", "ready", "draining", "stopped"]


@dataclass(kw_only=True)
class Worker:
    """One stage process. `describe` adds what only the stage knows to each heartbeat."""

    role: Role
    instance: str
    model: str
    contract: str
    broker: Broker
    table: WorkerTable
    cancels: Cancels
    slots: int
    describe: Callable[[], dict[str, Any]] = dict
    state: State = "starting"
    _beacon: Beacon | None = field(default=None, repr=False)

    @property
    def slug(self) -> str:
        """The model's token in subjects."""
        return subjects.model_slug(self.model)

    @property
    def pool(self) -> str:
        """The token of the queues that only workers of this contract share."""
        return subjects.pool(self.slug, self.contract)

    def heartbeat(self) -> Heartbeat:
        """Return what this worker is right now."""
        base = Heartbeat(
            role=self.role,
            instance=self.instance,
            model=self.model,
            contract=self.contract,
            state=self.state,
            slots=self.slots,
            num_running=0,
        )
        return msgspec.structs.replace(base, **self.describe())

    async def enter(self, state: State) -> None:
        """Change the state, and tell everybody at once."""
        self.state = state
        logger.info(
            "%s is %s",
            self.instance,
            state,
            extra={"action": f"worker_{state}", "worker": self.instance},
        )
        if self._beacon is not None:
            await self._beacon.beat()

    async def leave(self) -> None:
        """Say goodbye, so that nobody has to wait for this worker to fall silent."""
        try:
            await self.enter("stopped")
        except BrokerError as error:
            logger.warning("goodbye not sent: %s", error, extra={"action": "goodbye_lost"})

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Keep a message that can't be worked off for a person to look at, and take it off its queue."""
        letter = DeadLetter(
            stage=self.role,
            reason=reason,
            subject=delivery.subject,
            headers=dict(delivery.headers),
            payload=delivery.payload,
            num_delivered=delivery.num_delivered,
        )
        logger.error(
            "message on %s put aside: %s",
            delivery.subject,
            reason,
            extra={"action": "dead_letter", "subject": delivery.subject},
        )
        await self.broker.publish_durable(
            subjects.dead_letter(self.role, self.slug),
            wire.encode(letter),
            message_id=uuid.uuid4().hex,
        )
        await delivery.term(reason)

    async def settle(
        self,
        delivery: Delivery,
        work: Callable[[Delivery], Awaitable[None]],
        give_up: Callable[[Delivery], Awaitable[None]],
    ) -> None:
        """Run `work`, which acks; a message on which it fails comes again, and at last is put aside.

        A message may also end the process that works on it: so what was delivered too often is not tried.

        Raises: EngineDeadError, which ends the worker; what it held is delivered to another one.
        """
        if delivery.num_delivered > MAX_DELIVERIES:
            reason = f"delivered {MAX_DELIVERIES} times and never settled"
            await self._put_aside(delivery, give_up, reason)
            return
        try:
            await work(delivery)
        except (EngineDeadError, asyncio.CancelledError):
            await self._give_back(delivery, HANDOVER_DELAY_S)
            raise
        except BrokerError as error:
            logger.warning(
                "message on %s not settled, it will come again: %s",
                delivery.subject,
                error,
                extra={"action": "not_settled", "subject": delivery.subject},
            )
        except Exception as error:
            logger.exception(
                "message on %s made this worker fail",
                delivery.subject,
                extra={"action": "unexpected_error", "subject": delivery.subject},
            )
            if delivery.num_delivered < MAX_DELIVERIES:
                await self._give_back(delivery, REDELIVERY_DELAY_S)
                return
            await self._put_aside(delivery, give_up, f"{type(error).__name__}: {error}")

    async def _put_aside(
        self, delivery: Delivery, give_up: Callable[[Delivery], Awaitable[None]], reason: str
    ) -> None:
        """Tell the caller, where there is one, and keep the message; what fails here is tried again later."""
        try:
            with contextlib.suppress(WireError):  # it can't be read: nobody can be told
                await give_up(delivery)
            await self.dead_letter(delivery, reason)
        except (BrokerError, RequestError) as error:
            logger.error(
                "message on %s not put aside yet: %s",
                delivery.subject,
                error,
                extra={"action": "dead_letter_failed", "subject": delivery.subject},
            )
            await self._give_back(delivery, REDELIVERY_DELAY_S)

    async def _give_back(self, delivery: Delivery, delay_s: float) -> None:
        """Let a worker have the message again soon; without a broker it comes after `ack_wait`."""
        try:
            await delivery.nak(delay_s)
        except BrokerError as error:
            logger.warning(
                "message on %s comes again only after ack_wait: %s",
                delivery.subject,
                error,
                extra={"action": "nak_failed", "subject": delivery.subject},
            )

    async def publish_terminal(self, tenant: str, lane: Lane, terminal: Terminal) -> None:
        """End a request. Only the first terminal of a request counts; a later one is not published.

        Raises: BrokerError when the broker does not take it in time, PayloadTooLargeError, QueueFullError.
        """
        payload = wire.encode(terminal)
        name = f"{tenant}.{terminal.request_id}"
        if lane is not Lane.RT:
            subject = subjects.res(tenant, terminal.request_id)
            is_first = await self.broker.publish_durable(
                subject, payload, message_id=f"{name}.result", expect_new_subject=True
            )
            if not is_first:
                stored = await self.broker.last(subject)
                payload = payload if stored is None else stored.payload
        await self.broker.publish_durable(
            subjects.out(tenant, terminal.request_id), payload, message_id=f"{name}.terminal"
        )


def status_of(error: RequestError) -> Status:
    """Return how a request that failed with `error` ends."""
    if isinstance(error, CancelledRequestError):
        return "cancelled"
    return "expired" if isinstance(error, ExpiredError) else "error"


def terminal_of(
    request_id: str, error: RequestError, *, seq: int = 0, timings: Timings | None = None
) -> Terminal:
    """Return the terminal of a request that failed after `seq` messages of its answer."""
    return Terminal(
        request_id=request_id,
        seq=seq,
        status=status_of(error),
        http_status=error.http_status,
        body=error_body(error),
        retry_after_s=1.0 if error.retryable else None,
        timings=timings or Timings(),
    )


async def _connected(settings: Settings, role: Role, instance: str, stop: asyncio.Event) -> Broker:
    """Wait for the broker, however late it comes, but not longer than the process is to run."""
    connecting = asyncio.create_task(Broker.connect(settings.broker, role=role, name=instance))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            return connecting.result()
        raise StoppedError(f"{instance} was stopped before it reached the broker")
    finally:
        for task in (connecting, stopping):
            task.cancel()
        await asyncio.gather(connecting, stopping, return_exceptions=True)


@asynccontextmanager
async def joined(
    settings: Settings,
    role: Role,
    *,
    model: str,
    contract: str,
    slots: int,
    stop: asyncio.Event,
) -> AsyncIterator[Worker]:
    """Join the pipeline: connect, declare the model's queues, send heartbeats; leave it at the end.

    Raises: StoppedError when `stop` is set before the broker was reached.
    """
    instance = f"{role}-{uuid.uuid4().hex[:8]}"
    broker = await _connected(settings, role, instance, stop)
    try:
        worker = Worker(
            role=role,
            instance=instance,
            model=model,
            contract=contract,
            broker=broker,
            table=WorkerTable(broker),
            cancels=Cancels(),
            slots=slots,
        )
        await broker.declare_model(worker.slug, worker.pool)
        await worker.table.start()
        await worker.cancels.start(broker)
        beacon = Beacon(broker, worker.heartbeat)
        worker._beacon = beacon
        await beacon.start()
        try:
            yield worker
        finally:
            await worker.leave()
            await beacon.stop()
            await worker.table.stop()
    finally:
        await broker.close()
