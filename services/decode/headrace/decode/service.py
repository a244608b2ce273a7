"""The decode process: takes a job when a slot is free, and owns it until its terminal is published."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.decode import engine as engines
from headrace.decode.continuation import may_continue
from headrace.decode.generation import generate
from headrace.decode.handler import DecodeHandler, Stopwatch
from headrace.decode.links import Links
from headrace.decode.live_streams import LiveStreams
from headrace.decode.owned import Owned
from headrace.decode.ownership import Ownership
from headrace.decode.peers import Peers
from headrace.decode.preemption import Preemption
from headrace.decode.prefill_leg import PrefillLeg
from headrace.decode.prefix_index import PrefixIndex
from headrace.decode.stream import Stream
from headrace.decode.takeover import Start, Succession
from headrace.engine.interface import DecodeEngine, EngineInfo, watch_engine
from headrace.shared import metrics, spans, subjects, wire
from headrace.shared.broker import Delivery, WorkQueue
from headrace.shared.choices import check_choices
from headrace.shared.contract import contract, served_name
from headrace.shared.ends import has_result, publish_end
from headrace.shared.errors import (
    BadRequestError,
    CancelledRequestError,
    EngineRequestError,
    MalformedMessageError,
    NoWorkerError,
    RequestError,
    WireError,
)
from headrace.shared.intake import Intake, Slots, all_or_none, guarded
from headrace.shared.messages import (
    Job,
    StreamEnd,
)
from headrace.shared.openai_errors import failure_of
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import Worker, joined, status_of, terminal_of

logger = logging.getLogger(__name__)

END_GRACE_S = 10.0
ELSEWHERE_PAUSE_S = 1.0
"""Until the queue gives a job out again whose owner is there: that one takes it off the queue when it has ended."""


async def run(settings: Settings, *, engine: EngineKind, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then finish the running jobs.

    Raises: EngineDeadError when the engine can't start or dies.
    """
    decode_engine = engines.build(settings, engine)
    try:
        # Before any connection: a forked engine inherits sockets.
        info = await decode_engine.start()
        async with joined(
            settings,
            Role.DECODE,
            model=served_name(settings),
            contract=contract(settings, engine=engine),
            slots=settings.decode.slots,
            stop=stop,
        ) as worker:
            service = DecodeService(settings, worker, decode_engine, info)
            watch = watch_engine(
                decode_engine, stuck_s=settings.decode.engine_stuck_s, on_dead=worker.fail
            )
            await guarded(service.serve(stop), watch)
    finally:
        await decode_engine.shutdown()


class DecodeService:
    """Takes jobs, and connects each to its engine, its prefill worker and its derender worker."""

    def __init__(
        self, settings: Settings, worker: Worker, engine: DecodeEngine, info: EngineInfo
    ) -> None:
        self._settings = settings.decode
        self._worker = worker
        self._engine = engine
        self._info = info
        self._slots = Slots(worker.slots)
        self._links = Links(worker)
        self._preemption = Preemption(self._slots.notify)
        self._succession = Succession(worker, engine)
        self._ownership = Ownership(worker, self._succession)
        self._streams = LiveStreams(worker, self._links, self._ownership)
        self._peers = Peers(worker, engine)
        self._leg = PrefillLeg(
            worker,
            engine,
            info,
            self._peers,
            timeout_s=self._settings.prefill_timeout_s,
            margin_s=self._settings.handoff_margin_s,
        )
        self._handler = DecodeHandler(
            engine,
            self._leg,
            PrefixIndex(info.block_size, info.num_blocks),
            local_prefill_threshold=self._settings.local_prefill_threshold,
            is_colocated=self._settings.colocated,
            max_attempts=self._settings.max_attempts,
        )
        worker.describe = self._describe

    async def serve(self, stop: asyncio.Event) -> None:
        """Take jobs until `stop`, then drain."""
        if not self._settings.colocated:
            await self._leg.start()
        await self._streams.start()
        await self._ownership.start()
        queues = [WorkQueue.job(self._worker.pool, lane) for lane in Lane]
        intake = Intake(
            self._worker.broker,
            queues,
            self._slots,
            lambda delivery: self._worker.settle(delivery, self._work, self._give_up),
            on_stop=lambda: self._worker.enter("draining"),
            preemption=self._preemption,
        )
        if not self._settings.colocated:
            await self._peers.greet_all()
        await self._worker.enter("ready")
        watches = [self._links.watch(), self._ownership.watch()]
        if not self._settings.colocated:
            watches.append(self._peers.run())
        try:
            await guarded(
                intake.run(stop, drain_timeout_s=self._settings.drain_timeout_s),
                all_or_none(watches),
            )
        finally:
            self._links.close()
            self._streams.close()

    async def _work(self, delivery: Delivery) -> None:
        try:
            job = wire.decode(delivery.payload, Job)
            subjects.out(
                job.tenant, job.request_id
            )  # names that no answer could be published under
            self._check_subject(job, delivery)
        except WireError as error:
            await self._worker.dead_letter(delivery, str(error))
            return
        try:
            self._check_servable(job)
        except RequestError as error:
            await self._publish_failure(job, error)
            await delivery.ack()
            return
        async with delivery.keep_alive():
            # This worker may have it still: it was away for longer than `ack_wait`.
            if await self._ownership.settled(job, delivery):
                return
            is_in_doubt = delivery.num_delivered > 1 or self._may_be_forgotten(job)
            if is_in_doubt and await self._ownership.is_elsewhere(job):
                logger.info(
                    "another worker has the job",
                    extra={"action": "job_elsewhere", "request_id": job.request_id},
                )
                await self._worker.hand_back(delivery, ELSEWHERE_PAUSE_S)
                return
            # While others were asked, it may have come here once more, and been taken on.
            if is_in_doubt and await self._ownership.settled(job, delivery):
                return
            await self._take_on(job, delivery)

    async def _take_on(self, job: Job, delivery: Delivery) -> None:
        """Own a job until it is acked, goes back, or another worker takes it over."""
        with self._ownership.hold(job, delivery.num_delivered) as owned:
            try:
                await self._answer(owned, delivery)
                await self._ownership.check(owned)
                await delivery.ack()
                owned.ended.set_result(True)
            except asyncio.CancelledError:
                if not (owned.is_superseded or owned.is_given_back) or owned.task.uncancel() > 0:
                    raise
                await self._let_go(owned, delivery)

    async def _let_go(self, owned: Owned, delivery: Delivery) -> None:
        if owned.is_superseded:
            logger.warning(
                "another worker has taken the job over",
                extra={"action": "job_superseded", "request_id": owned.job.request_id},
            )
            return
        metrics.PREEMPTED.inc()
        logger.info(
            "job given back: a more urgent one needs its slots",
            extra={"action": "job_preempted", "request_id": owned.job.request_id},
        )
        await self._worker.hand_back(delivery)

    async def _answer(self, owned: Owned, delivery: Delivery) -> None:
        start: Start | None = Start(epoch=owned.epoch)
        if delivery.num_delivered > 1 or self._may_be_forgotten(owned.job):
            start = await self._succession.begin(owned.job, delivery.num_delivered)
        elif await has_result(self._worker, owned.job):  # it was submitted twice
            start = None
        if start is not None:
            owned.epoch = start.epoch
            job = owned.job
            self._worker.events.request("started", job.tenant, job.lane, job.request_id)
            await self._own(owned, start, delivery.reply)

    def _may_be_forgotten(self, job: Job) -> bool:
        """Whether a killed broker may have forgotten that it gave the job to somebody before.

        It has, at times, where a worker was killed with it: so it counts as well when this worker is new.
        """
        render = job.timings.workers.get("render", "")
        published = job.published + self._worker.table.clock_offset(render)
        return self._worker.broker.back_at >= published

    def _check_subject(self, job: Job, delivery: Delivery) -> None:
        """The broker's permissions and limits hold a tenant to its subject, not to what stands in the job."""
        if delivery.subject != subjects.job(self._worker.pool, job.tenant, job.lane):
            raise MalformedMessageError(
                f"a job of tenant {job.tenant}, lane {job.lane}, came on {delivery.subject}"
            )

    async def _give_up(self, delivery: Delivery) -> None:
        job = wire.decode(delivery.payload, Job)
        await self._publish_failure(job, EngineRequestError("this request made decode fail"))

    def _check_servable(self, job: Job) -> None:
        """Refuse what render would not have published: whoever published it is wrong. Raises: RequestError."""
        if job.contract != self._worker.contract:
            raise NoWorkerError(
                f"request {job.request_id} was rendered under contract {job.contract}, and published to workers "
                f"of {self._worker.contract}"
            )
        check_choices(job.n, len(job.prompts), self._settings.max_choices)

    async def _own(self, owned: Owned, start: Start, hand_back: str) -> None:
        """Bring a job to its terminal, as its `start.epoch`-th owner."""
        job = owned.job
        extra_slots = len(job.prompts) * job.n - 1
        with self._streams.open(
            owned, start, keeps_entries=self._may_continue(job), hand_back=hand_back
        ) as stream:
            self._slots.take(extra_slots)
            delivery = asyncio.create_task(stream.deliver())
            try:
                await self._run(owned, stream, start, delivery)
            finally:
                delivery.cancel()
                self._slots.give(extra_slots)

    def _may_continue(self, job: Job) -> bool:
        try:
            return may_continue(job, self._engine)
        except BadRequestError:
            return False  # the engine will say so too, and with that the request ends

    async def _run(
        self, owned: Owned, stream: Stream, start: Start, delivery: asyncio.Task[None]
    ) -> None:
        job = owned.job
        watch = Stopwatch(
            job,
            instance=self._worker.instance,
            now=time.time,
            is_continued=start.continuation is not None,
        )
        spans.taken(self._worker.tracer, job, watch.taken, start.epoch)
        error: RequestError | None = None
        try:
            with self._preemption.running(owned, stream):
                await generate(self._worker, self._handler, job, stream, start, watch, delivery)
        except RequestError as failed:
            error = failed
            if isinstance(failed, CancelledRequestError):
                metrics.CANCELS_EFFECTIVE.labels(self._worker.role).inc()
        await self._ownership.check(owned)
        timings = watch.read(stream.log.num_token_ids)
        spans.decoded(
            self._worker.tracer,
            job,
            timings,
            start=watch.ready_at,
            first=watch.first,
            last=watch.last if error is None else time.time(),
            num_descriptors=watch.num_kv_descriptors,
            kv_parts=watch.kv_parts,
            error=None if error is None else error.code,
        )
        self._log_end(job, error, stream)
        stream.finish(
            StreamEnd(
                stream_id=stream.stream_id,
                num_entries=len(stream.log),
                timings=timings,
                failure=None if error is None else failure_of(error),
                status="ok" if error is None else status_of(error),
            )
        )
        try:
            async with asyncio.timeout(max(0.0, job.deadline - time.time()) + END_GRACE_S):
                await delivery
        except RequestError as refused:
            await self._publish_failure(job, error or refused, epoch=start.epoch)
        except TimeoutError:
            late = NoWorkerError("no derender worker took the answer in time")
            await self._publish_failure(job, error or late, epoch=start.epoch)

    async def _publish_failure(self, job: Job, error: RequestError, *, epoch: int = 0) -> None:
        terminal = terminal_of(job.request_id, error, epoch=epoch, timings=job.timings)
        await publish_end(self._worker, job, terminal)

    def _log_end(self, job: Job, error: RequestError | None, stream: Stream) -> None:
        logger.log(
            logging.DEBUG if error is None else logging.INFO,
            "job generated" if error is None else f"job failed: {error.code}",
            extra={
                "action": "decode_done" if error is None else "decode_failed",
                "request_id": job.request_id,
                "num_output_token_ids": stream.log.num_token_ids,
            },
        )

    def _describe(self) -> dict[str, object]:
        stats = self._engine.stats()
        return {
            "num_running": self._slots.total - self._slots.free,
            "max_model_len": self._info.max_model_len,
            "epoch": self._info.engine_id,
            "kv_blocks_total": self._info.num_blocks,
            "kv_blocks_free": stats.num_blocks_free,
            "num_external_cached_token_ids": stats.num_external_cached_token_ids,
            "num_prefilled": self._handler.num_local_prefills,
            "num_generated_token_ids": self._handler.num_generated_token_ids,
            "unreachable": self._peers.unusable,
            "is_colocated": self._settings.colocated,
        }
