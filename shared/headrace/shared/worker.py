"""What every stage process is made of: a name, a broker, a heartbeat, the cancels it hears, its ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.shared import metrics, subjects, tracing, wire
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
from headrace.shared.events import Events
from headrace.shared.exposition import exposed
from headrace.shared.log_level import following
from headrace.shared.messages import (
    Cancel,
    DeadLetter,
    Heartbeat,
    Returned,
    Status,
    Terminal,
    Timings,
)
from headrace.shared.openai_errors import error_body
from headrace.shared.outbox import Outbox
from headrace.shared.owners import is_ended_by
from headrace.shared.pulse import Pulse, answering_pings, ping_over
from headrace.shared.queue_ages import QueueAges
from headrace.shared.readers import Readers
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.workers import Beacon, WorkerTable

logger = logging.getLogger(__name__)

MAX_DELIVERIES = 5
MAX_LOSSES = 20
"""Deliveries after which a message that meets a lost broker is not given back as unharmed any more."""
REDELIVERY_DELAY_S = 1.0
HANDOVER_DELAY_S = 0.1
"""For the takes of a worker that ends to be withdrawn, so that it does not get its own message back."""

LAG_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Between looks at a stream whose replicas follow its leader a little later."""

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
    outbox: Outbox
    events: Events
    pulse: Pulse
    readers: Readers
    slots: int
    tracer: tracing.Tracer = tracing.OFF
    slo: metrics.Slo = metrics.NO_SLO
    describe: Callable[[], dict[str, Any]] = dict
    counts: Callable[[], dict[str, float]] = dict  #: further values of `exposition.SHOWN`
    state: State = "starting"
    _beacon: Beacon | None = field(default=None, repr=False)
    _ages: QueueAges | None = field(default=None, repr=False)

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
            oldest_wait_s={} if self._ages is None else self._ages.waits_s,
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

    async def fail(self) -> None:
        """Be seen at once as a worker that takes nothing, before what it holds is given back."""
        await self._try_to_enter("draining")

    async def leave(self) -> None:
        """Say goodbye, so that nobody has to wait for this worker to fall silent."""
        await self._try_to_enter("stopped")

    async def _try_to_enter(self, state: State) -> None:
        try:
            await self.enter(state)
        except BrokerError as error:
            logger.warning("%s not told: %s", state, error, extra={"action": "heartbeat_failed"})

    async def cancel(self, tenant: str, request_id: str, reason: str) -> None:
        """Stop a request wherever it is, here too; whoever calls does so again until it has ended."""
        metrics.CANCELS_ASKED.labels(self.role).inc()
        cancel = Cancel(request_id=request_id, tenant=tenant, reason=reason)
        try:
            await self.broker.publish(subjects.cancel(tenant, request_id), wire.encode(cancel))
        except BrokerError as error:
            logger.warning(
                "cancel not published: %s",
                error,
                extra={"action": "cancel_failed", "request_id": request_id},
            )

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
        metrics.DEAD_LETTERS.labels(metrics.queue_of(delivery.subject)[0]).inc()
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
        metrics.taken(delivery)
        num_losses = self.broker.num_losses
        num_tries = await self._num_tries(delivery)
        if num_tries > MAX_DELIVERIES:
            reason = f"delivered {MAX_DELIVERIES} times and never settled"
            await self._put_aside(delivery, give_up, reason)
            return
        try:
            await work(delivery)
        except EngineDeadError:
            await self._give_back(delivery, HANDOVER_DELAY_S)
            raise
        except asyncio.CancelledError:
            await self.hand_back(delivery, HANDOVER_DELAY_S)
            raise
        except BrokerError as error:
            logger.warning(
                "message on %s not settled, it will come again: %s",
                delivery.subject,
                error,
                extra={"action": "not_settled", "subject": delivery.subject},
            )
            # Nothing is wrong with the message, unless it is what breaks the connection each time.
            was_lost = self.broker.num_losses != num_losses
            if was_lost and delivery.num_delivered <= MAX_LOSSES:
                await self.hand_back(delivery, REDELIVERY_DELAY_S)
        except Exception as error:
            logger.exception(
                "message on %s made this worker fail",
                delivery.subject,
                extra={"action": "unexpected_error", "subject": delivery.subject},
            )
            if num_tries < MAX_DELIVERIES:
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

    async def hand_back(self, delivery: Delivery, delay_s: float = 0.0) -> None:
        """Give a message back with which nothing is wrong: that does not count as a failed delivery.

        Without a broker it comes again after `ack_wait`, and counts.
        """
        try:
            returned = Returned(num_returns=await self._num_returns(delivery) + 1)
            await self.broker.publish_durable(
                subjects.returned(delivery.stream, delivery.sequence),
                wire.encode(returned),
                message_id=f"{delivery.stream}.{delivery.sequence}.{delivery.num_delivered}",
            )
        except (BrokerError, RequestError, WireError) as error:
            logger.warning(
                "the return of a message on %s counts as a failed delivery: %s",
                delivery.subject,
                error,
                extra={"action": "return_not_noted", "subject": delivery.subject},
            )
        await self._give_back(delivery, delay_s)

    async def _num_tries(self, delivery: Delivery) -> int:
        """Return how often the message was delivered, without the times that it came back unharmed."""
        if delivery.num_delivered < MAX_DELIVERIES:
            return delivery.num_delivered  # few enough, whatever they were
        try:
            return delivery.num_delivered - await self._num_returns(delivery)
        except (BrokerError, WireError) as error:
            logger.warning(
                "nobody knows how often the message on %s failed: it is tried again: %s",
                delivery.subject,
                error,
                extra={"action": "returns_unknown", "subject": delivery.subject},
            )
            return 1

    async def _num_returns(self, delivery: Delivery) -> int:
        """Return how often the message was given back unharmed. Raises: BrokerError, WireError."""
        if delivery.num_delivered == 1:
            return 0
        noted = await self.broker.last(subjects.returned(delivery.stream, delivery.sequence))
        return 0 if noted is None else wire.decode(noted.payload, Returned).num_returns

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

    async def publish_terminal(
        self,
        tenant: str,
        lane: Lane,
        terminal: Terminal,
        *,
        reply_to: str | None = None,
        keeps_result: bool = False,
    ) -> None:
        """End a request. Only the first terminal of a request counts; a later one is not published.

        It is kept on `res` if the lane is `std` or `bulk`, or the request `keeps_result`.
        `reply_to` is told too, without an ack: whoever listens there may miss it, and read what was stored.
        Raises: BrokerError when the broker does not take it in time, PayloadTooLargeError, QueueFullError.
        """
        name, epoch = f"{tenant}.{terminal.request_id}", terminal.epoch
        is_first = True
        if lane is not Lane.RT or keeps_result:
            subject = subjects.res(tenant, terminal.request_id)
            # A message ID of its own: what is stored decides who was first, and an operator may have taken it out
            # so that the request runs again; the broker would still remember an ID that all ends share.
            is_first = await self.broker.publish_durable(
                subject,
                wire.encode(terminal),
                message_id=f"{name}.result.{uuid.uuid4().hex}",
                expect_last=0,
            )
            if not is_first and (stored := await self.broker.last(subject)) is not None:
                # It is the end, whoever took over since.
                terminal = msgspec.structs.replace(wire.decode(stored.payload, Terminal), epoch=0)
        # Before the reader is told: a request of which `out` has the end is not looked at again.
        await self.events.request_ended(tenant, lane, terminal)
        payload = wire.encode(msgspec.structs.replace(terminal, result=b""))
        subject = subjects.out(tenant, terminal.request_id)
        message_id = f"{name}.terminal.{epoch}"
        is_only_there = lane is Lane.RT and not keeps_result
        if is_only_there and self.broker.back_at >= (terminal.timings.accepted or 0.0):
            is_stored, payload = await self._end_first(subject, payload, message_id, epoch)
        else:
            is_stored = await self.outbox.publish_durable(subject, payload, message_id=message_id)
        if is_first and is_stored:
            metrics.request_ended(lane, terminal, self.slo)
        if reply_to is not None:
            await self._reply(reply_to, payload)

    async def _end_first(
        self, subject: str, payload: bytes, message_id: str, epoch: int
    ) -> tuple[bool, bytes]:
        """Publish an end on `out` unless one is there; return whether it was stored, and the end that counts.

        A broker that was killed forgets acks, and who owns what: a request that is being answered may be
        submitted again, and two workers end it. So this is how a request ends during which the broker came back.
        Raises: as `publish_terminal`.
        """
        pauses = iter(LAG_PAUSES_S)
        before = -1
        while True:
            # All of it: the worker that did not hear of an end goes on, and its chunks come behind that.
            messages = await self.broker.replay(subject)
            end = next((found for found in messages if is_ended_by(found, epoch)), None)
            if end is not None:
                return False, end.payload
            sequence = int(messages[-1].headers["Nats-Sequence"]) if messages else 0
            if sequence == before:  # refused for what this replica of the stream does not have yet
                if (pause_s := next(pauses, None)) is None:
                    raise BrokerError(f"{subject}: the end is refused, and nobody sees why")
                await asyncio.sleep(pause_s)
            before = sequence
            if await self.outbox.publish_durable(
                subject, payload, message_id=message_id, expect_last=sequence
            ):
                return True, payload

    async def _reply(self, subject: str, payload: bytes) -> None:
        try:
            await self.broker.publish(subject, payload)
        except (BrokerError, RequestError) as error:  # the request has its end all the same
            logger.warning(
                "not told on %s: %s",
                subject,
                error,
                extra={"action": "reply_failed", "subject": subject},
            )


def status_of(error: RequestError) -> Status:
    """Return how a request that failed with `error` ends."""
    if isinstance(error, CancelledRequestError):
        return "cancelled"
    return "expired" if isinstance(error, ExpiredError) else "error"


def terminal_of(
    request_id: str,
    error: RequestError,
    *,
    seq: int = 0,
    epoch: int = 0,
    timings: Timings | None = None,
) -> Terminal:
    """Return the terminal of a request that failed after `seq` messages of its answer, as its `epoch`-th owner's."""
    return Terminal(
        request_id=request_id,
        seq=seq,
        status=status_of(error),
        http_status=error.http_status,
        body=error_body(error),
        retry_after_s=1.0 if error.retryable else None,
        epoch=epoch,
        timings=timings or Timings(),
    )


@asynccontextmanager
async def ended_by(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watch` beside the block; what it raises cancels the block, and is raised in its place."""
    block = asyncio.current_task()
    assert block is not None
    watching = asyncio.create_task(watch)

    def has_failed() -> bool:
        return watching.done() and not watching.cancelled() and watching.exception() is not None

    watching.add_done_callback(lambda _: block.cancel() if has_failed() else None)
    try:
        yield
    except asyncio.CancelledError:
        if not has_failed():
            raise
        block.uncancel()
        watching.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


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

    Raises: StoppedError when `stop` is set before the broker was reached, BrokerError when the broker
    closes the connection for good: what runs in the block is cancelled then.
    """
    instance = f"{role}-{uuid.uuid4().hex[:8]}"
    tracer = tracing.start(role, instance)
    broker = await _connected(settings, role, instance, stop)
    try:
        pulse = Pulse(ping_over(broker), on_lost=lambda peer: table.forget(peer))
        broker.on_reconnect(pulse.reconnected)  # first: before anybody is pinged again
        table = WorkerTable(broker)
        worker = Worker(
            role=role,
            instance=instance,
            model=model,
            contract=contract,
            broker=broker,
            table=table,
            cancels=Cancels(),
            outbox=Outbox(broker),
            events=Events(broker, settings.events.lanes),
            pulse=pulse,
            readers=Readers(table, lambda: broker.is_connected),
            slots=slots,
            tracer=tracer,
            slo=metrics.Slo(ttft_s=settings.metrics.slo_ttft_s, tpot_s=settings.metrics.slo_tpot_s),
        )
        ages = QueueAges(broker, table, instance, role, slug=worker.slug, contract=contract)
        worker._ages = ages
        if model:
            await broker.declare_model(worker.slug, worker.pool)
        await worker.table.start()
        await worker.cancels.start(broker)
        beacon = Beacon(broker, worker.heartbeat)
        worker._beacon = beacon
        await beacon.start()
        try:
            async with (
                answering_pings(broker, instance),
                ended_by(broker.closed_for_good()),
                ended_by(worker.readers.run()),
                ended_by(ages.run()),
                exposed(settings.metrics, worker.heartbeat, lambda: worker.counts()),
                following(broker, role),
            ):
                yield worker
        finally:
            pulse.stop()
            await worker.events.close()
            await worker.leave()
            await beacon.stop()
            await worker.table.stop()
    finally:
        await broker.close()
        await tracer.close()
