"""The prefill process: takes tasks while its KV cache has room, answers each with a handoff."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

from headrace.engine.interface import EngineInfo, PrefillEngine, watch_engine
from headrace.prefill import engine as engines
from headrace.prefill.copies import Copies
from headrace.prefill.errand import Errand
from headrace.prefill.handler import PrefillHandler
from headrace.shared import metrics, spans, subjects, wire
from headrace.shared.broker import Delivery, Received, WorkQueue
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import (
    BrokerError,
    CancelledRequestError,
    EngineRequestError,
    ExpiredError,
    MalformedMessageError,
    RequestError,
    WireError,
)
from headrace.shared.intake import Intake, Slots, all_or_none, guarded
from headrace.shared.messages import Handoff, Handshake, PrefillFailed, PrefillTask
from headrace.shared.openai_errors import failure_of
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.tasks import spawn
from headrace.shared.token_ids import count, pack, prompt_hash
from headrace.shared.worker import Worker, joined

logger = logging.getLogger(__name__)

LEASE_POLL_S = 0.25
HANDSHAKE_TOKEN_IDS = pack([0])


async def run(settings: Settings, *, engine: EngineKind, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then wait until the handoffs are pulled or expired.

    Raises: EngineDeadError when the engine can't start or dies.
    """
    prefill_engine = engines.build(settings, engine)
    try:
        # Before any connection: a forked engine inherits sockets.
        info = await prefill_engine.start()
        async with joined(
            settings,
            Role.PREFILL,
            model=served_name(settings),
            contract=contract(settings, engine=engine),
            slots=settings.prefill.slots,
            stop=stop,
        ) as worker:
            service = PrefillService(settings, worker, prefill_engine, info)
            watch = watch_engine(
                prefill_engine, stuck_s=settings.prefill.engine_stuck_s, on_dead=worker.fail
            )
            await guarded(service.serve(stop), watch)
    finally:
        await prefill_engine.shutdown()


class PrefillService:
    """Takes prefill tasks and publishes handoffs."""

    def __init__(
        self, settings: Settings, worker: Worker, engine: PrefillEngine, info: EngineInfo
    ) -> None:
        self._settings = settings.prefill
        self._kv_host = settings.nixl.host
        self._worker = worker
        self._engine = engine
        self._info = info
        self._slots = Slots(worker.slots)
        self._num_prefilled = 0
        self._copies = Copies(self._slots)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._handler = PrefillHandler(
            engine,
            info,
            instance=worker.instance,
            contract=worker.contract,
            clock_offset=worker.table.clock_offset,
        )
        worker.describe = self._describe
        worker.counts = self._counts

    async def serve(self, stop: asyncio.Event) -> None:
        """Take tasks until `stop`, then drain."""
        await self._worker.broker.subscribe(
            subjects.handshake(self._worker.instance), self._on_handshake
        )
        own = WorkQueue.prefill_worker(self._worker.pool, self._worker.instance)
        await self._worker.broker.declare_queue(own)
        # What is for this worker alone has failed elsewhere, and waits behind nothing.
        queues = [[own], [WorkQueue.prefill(self._worker.pool, lane) for lane in Lane]]
        intakes = [
            Intake(
                self._worker.broker,
                some,
                self._slots,
                lambda delivery: self._worker.settle(delivery, self._work, self._give_up),
                is_open=self._has_room,
                on_stop=self._drain,
            )
            for some in queues
        ]
        await self._worker.enter("ready")
        timeout_s = self._settings.drain_timeout_s
        await all_or_none(intake.run(stop, drain_timeout_s=timeout_s) for intake in intakes)
        await self._wait_for_leases()

    async def _drain(self) -> None:
        if self._worker.state != "draining":
            await self._worker.enter("draining")

    def _has_room(self) -> bool:
        used = 1 - self._engine.stats().num_blocks_free / self._info.num_blocks
        return used < self._settings.max_kv_usage

    async def _wait_for_leases(self) -> None:
        """Keep the engine until each handoff was pulled, or is expired."""
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                # An engine has no event for the end of a lease.
                while self._engine.stats().num_blocks_free < self._info.num_blocks:  # noqa: ASYNC110
                    await asyncio.sleep(LEASE_POLL_S)
        except TimeoutError:
            logger.warning(
                "leases are still held after %.0f s (prefill.drain_timeout_s)",
                self._settings.drain_timeout_s,
                extra={"action": "prefill_drain_timeout"},
            )

    def _on_handshake(self, received: Received) -> None:
        spawn(self._shake_hands(received), self._handshakes)

    async def _shake_hands(self, received: Received) -> None:
        """Answer with a handoff of one token ID, whose blocks the other side gives back at once."""
        try:
            request = wire.decode(received.payload, Handshake)
        except WireError as error:
            logger.warning(
                "unreadable handshake: %s", error, extra={"action": "handshake_unreadable"}
            )
            return
        now = time.time()
        task = PrefillTask(
            task_id=f"handshake-{uuid.uuid4().hex}",
            request_id="handshake",
            tenant="headrace",
            decode_instance=self._worker.instance,  # by whose clock the times are
            published=now,
            expires=now + self._info.lease_s,
            contract=request.contract,
            token_ids=HANDSHAKE_TOKEN_IDS,
            prompt_hash=prompt_hash(HANDSHAKE_TOKEN_IDS),
        )
        try:
            await self._worker.broker.respond(received, wire.encode(await self._answer(task)))
        except BrokerError as error:
            logger.warning("handshake not answered: %s", error, extra={"action": "handshake_lost"})

    async def _work(self, delivery: Delivery) -> None:
        try:
            task = wire.decode(delivery.payload, PrefillTask)
        except WireError as error:
            await self._worker.dead_letter(delivery, str(error))
            return
        if await self._copies.is_answered(task.task_id, delivery):
            await delivery.ack()
            return
        with self._copies.under_way(task.task_id) as has_answer:
            answer = await Errand(self._worker, task, self._traced, self._drop).run(delivery)
            has_answer.set_result(answer is not None)
        self._num_prefilled += isinstance(answer, Handoff)
        if answer is None:  # whatever was computed of it
            metrics.PREFILL_WASTED.labels("unwanted").inc(count(task.token_ids))

    async def _give_up(self, delivery: Delivery) -> None:
        task = wire.decode(delivery.payload, PrefillTask)
        failed = self._failed(task, EngineRequestError("this prompt made prefill fail"))
        await self._worker.broker.publish(subjects.kv(task.decode_instance), wire.encode(failed))

    async def _drop(self, handoff: Handoff) -> None:
        """Free the blocks of a handoff that nobody can have."""
        logger.info(
            "handoff dropped: nobody was told of it",
            extra={"action": "handoff_dropped", "request_id": handoff.request_id},
        )
        await self._engine.drop_lease(handoff.kv_transfer_params)

    async def _traced(self, task: PrefillTask) -> Handoff | PrefillFailed:
        answer = await self._answer(task)
        if isinstance(answer, Handoff):
            metrics.prefilled(task, answer)
        spans.prefilled(self._worker.tracer, task, answer, time.time())
        return answer

    async def _answer(self, task: PrefillTask) -> Handoff | PrefillFailed:
        try:
            handoff = await self._run(task)
        except (RequestError, MalformedMessageError) as error:
            if isinstance(error, CancelledRequestError):
                metrics.CANCELS_EFFECTIVE.labels(self._worker.role).inc()
            return self._failed(
                task, error if isinstance(error, RequestError) else EngineRequestError(str(error))
            )
        logger.debug(
            "prefill done",
            extra={
                "action": "prefill_done",
                "request_id": task.request_id,
                "seconds": round(handoff.prefill_s, 6),
                "num_cached_token_ids": handoff.num_cached_token_ids,
            },
        )
        return handoff

    def _failed(self, task: PrefillTask, error: RequestError) -> PrefillFailed:
        logger.warning(
            "prefill failed: %s",
            error,
            extra={"action": "prefill_failed", "request_id": task.request_id},
        )
        return PrefillFailed(
            task_id=task.task_id,
            request_id=task.request_id,
            prefill_instance=self._worker.instance,
            failure=failure_of(error),
        )

    async def _run(self, task: PrefillTask) -> Handoff:
        """Run the handler so that a cancel of the request, and the task's expiry, end it: in a task of its own."""
        # Decode's clock may be another one.
        offset = self._worker.table.clock_offset(task.decode_instance)
        reason = self._worker.cancels.reason(task.tenant, task.request_id, task.published + offset)
        if reason is not None:
            raise CancelledRequestError(f"request {task.request_id} was cancelled: {reason}")
        work = asyncio.current_task()
        assert work is not None
        ends: list[RequestError] = []

        def end(why: RequestError) -> None:
            if not ends:
                ends.append(why)
                work.cancel()

        def cancel(reason: str) -> None:
            end(CancelledRequestError(f"request {task.request_id} was cancelled: {reason}"))

        self._worker.cancels.watch(task.tenant, task.request_id, cancel)
        left_s = task.expires + offset - time.time()
        expired = ExpiredError(f"task {task.task_id} expired while it was computed")
        timer = asyncio.get_running_loop().call_later(max(0.0, left_s), end, expired)
        try:
            return await self._handler.handle(task)
        except asyncio.CancelledError:
            if not ends or work.uncancel() > 0:
                raise
            raise ends[0] from None
        finally:
            timer.cancel()
            self._worker.cancels.unwatch(task.tenant, task.request_id, cancel)

    def _counts(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            "headrace_handoffs_leased": stats.num_leases,
            "headrace_handoffs_expired": stats.num_expired_leases,
        }

    def _describe(self) -> dict[str, object]:
        stats = self._engine.stats()
        return {
            "num_running": self._slots.total - self._slots.free,
            "max_model_len": self._info.max_model_len,
            "epoch": self._info.engine_id,
            "kv_blocks_total": self._info.num_blocks,
            "kv_blocks_free": stats.num_blocks_free,
            "num_prefilled": self._num_prefilled,
            "kv_host": self._kv_host,
        }
