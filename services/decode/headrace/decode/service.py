"""The decode process: takes a job when a slot is free, and owns it until its terminal is published."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

from headrace.decode import engine as engines
from headrace.decode.frames import FrameLink
from headrace.decode.handler import DecodeHandler, Stopwatch, all_or_none
from headrace.decode.peers import Peers
from headrace.decode.prefill_leg import PrefillLeg
from headrace.decode.prefix_index import PrefixIndex
from headrace.decode.stream import Stream
from headrace.engine.interface import DecodeEngine, EngineInfo, watch_engine
from headrace.shared import subjects, wire
from headrace.shared.broker import Delivery, Received, WorkQueue
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import (
    CancelledRequestError,
    EngineRequestError,
    ExpiredError,
    NoWorkerError,
    RequestError,
    WireError,
)
from headrace.shared.intake import Intake, Slots, guarded
from headrace.shared.messages import (
    Chunk,
    Credit,
    Frame,
    Job,
    OpenStream,
    Resync,
    StopChoice,
    StreamDone,
    StreamEnd,
    StreamOpened,
    StreamRefused,
    StreamUnknown,
    Terminal,
)
from headrace.shared.openai_errors import failure_of
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import Worker, joined, status_of, terminal_of

logger = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 2.0
LINK_CHECK_S = 0.5
END_GRACE_S = 10.0
MAX_LINKS_REMEMBERED = 1_000


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
            await guarded(service.serve(stop), watch_engine(decode_engine))
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
        self._stream_ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._links: dict[str, tuple[FrameLink, asyncio.Task[None]]] = {}
        self._last_seqs: dict[str, int] = {}
        self._owned: dict[tuple[str, str], asyncio.Future[bool]] = {}
        self._leg = PrefillLeg(
            worker,
            engine,
            info,
            timeout_s=self._settings.prefill_timeout_s,
            margin_s=self._settings.handoff_margin_s,
        )
        self._peers = Peers(worker, engine)
        self._handler = DecodeHandler(
            engine,
            self._leg,
            PrefixIndex(info.block_size, info.num_blocks),
            local_prefill_threshold=self._settings.local_prefill_threshold,
            max_attempts=self._settings.max_attempts,
        )
        worker.describe = self._describe

    async def serve(self, stop: asyncio.Event) -> None:
        """Take jobs until `stop`, then drain."""
        await self._leg.start()
        await self._worker.broker.subscribe(subjects.ctl(self._worker.instance), self._on_control)
        queues = [WorkQueue.job(self._worker.pool, lane) for lane in Lane]
        intake = Intake(
            self._worker.broker,
            queues,
            self._slots,
            lambda delivery: self._worker.settle(delivery, self._work, self._give_up),
            on_stop=lambda: self._worker.enter("draining"),
        )
        await self._peers.greet_all()
        await self._worker.enter("ready")
        try:
            await guarded(
                intake.run(stop, drain_timeout_s=self._settings.drain_timeout_s),
                all_or_none([self._watch_links(), self._peers.run()]),
            )
        finally:
            for _, task in self._links.values():
                task.cancel()

    async def _work(self, delivery: Delivery) -> None:
        try:
            job = wire.decode(delivery.payload, Job)
            subjects.out(
                job.tenant, job.request_id
            )  # names that no answer could be published under
        except WireError as error:
            await self._worker.dead_letter(delivery, str(error))
            return
        if job.contract != self._worker.contract:
            await self._other_contract(job, delivery)
            return
        key = (job.tenant, job.request_id)
        async with delivery.keep_alive():
            if (
                key in self._owned
            ):  # this worker was away for longer than ack_wait, and has it still
                if await self._owned[key]:
                    await delivery.ack()
                else:
                    await delivery.nak()
                return
            ended = self._owned[key] = asyncio.get_running_loop().create_future()
            try:
                if delivery.num_delivered == 1 or await self._may_run_again(job):
                    await self._own(job, delivery.num_delivered)
                await delivery.ack()
                ended.set_result(True)
            finally:
                del self._owned[key]
                if not ended.done():
                    ended.set_result(False)

    async def _give_up(self, delivery: Delivery) -> None:
        job = wire.decode(delivery.payload, Job)
        await self._publish_failure(job, EngineRequestError("this request made decode fail"))

    async def _other_contract(self, job: Job, delivery: Delivery) -> None:
        """End a job that came on this contract's queue under another one: whoever published it is wrong."""
        error = NoWorkerError(
            f"request {job.request_id} was rendered under contract {job.contract}, and published to workers of "
            f"{self._worker.contract}"
        )
        await self._publish_failure(job, error)
        await delivery.ack()

    async def _may_run_again(self, job: Job) -> bool:
        """Decide on a job whose last owner is gone: it starts again only if nobody has seen a part of it."""
        result = subjects.res(job.tenant, job.request_id)
        if job.lane is not Lane.RT and await self._worker.broker.last(result) is not None:
            return False
        seen = await self._worker.broker.replay(subjects.out(job.tenant, job.request_id))
        messages = [wire.decode(received.payload, Chunk, Terminal) for received in seen]
        if any(isinstance(message, Terminal) for message in messages):
            return False
        chunks = [message for message in messages if isinstance(message, Chunk)]
        if not chunks:
            return True
        error = EngineRequestError(
            "the decode worker of this request ended in the middle of the answer"
        )
        terminal = terminal_of(
            job.request_id, error, seq=max(chunk.seq for chunk in chunks) + 1, timings=job.timings
        )
        await self._worker.publish_terminal(job.tenant, job.lane, terminal)
        return False

    async def _own(self, job: Job, epoch: int) -> None:
        """Bring a job to its terminal, as its `epoch`-th owner."""
        extra_slots = len(job.prompts) * job.n - 1
        stream = Stream(
            job,
            next(self._stream_ids),
            epoch=epoch,
            decode_instance=self._worker.instance,
            claim=self._claim,
            link_to=self._link_to,
        )
        self._streams[stream.stream_id] = stream
        self._slots.take(extra_slots)
        delivery = asyncio.create_task(stream.deliver())
        try:
            await self._run(job, stream, delivery)
        finally:
            delivery.cancel()
            self._slots.give(extra_slots)
            del self._streams[stream.stream_id]

    async def _run(self, job: Job, stream: Stream, delivery: asyncio.Task[None]) -> None:
        watch = Stopwatch(job, instance=self._worker.instance, now=time.time)
        error: RequestError | None = None
        try:
            await self._generate(job, stream, watch, delivery)
        except RequestError as failed:
            error = failed
        timings = watch.read(stream.log.num_token_ids)
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
            await self._publish_failure(job, error or refused)
        except TimeoutError:
            await self._publish_failure(
                job, error or NoWorkerError("no derender worker took the answer in time")
            )

    async def _generate(
        self, job: Job, stream: Stream, watch: Stopwatch, delivery: asyncio.Task[None]
    ) -> None:
        """Generate until the end, the deadline, a cancel, or a derender worker's refusal."""
        reason = self._worker.cancels.reason(job.tenant, job.request_id, job.timings.accepted)
        if reason is not None:
            raise CancelledRequestError(f"request {job.request_id} was cancelled: {reason}")
        remaining = job.deadline - time.time()
        if remaining <= 0:
            raise ExpiredError(f"request {job.request_id} waited for decode past its deadline")
        work = asyncio.create_task(self._handler.generate(job, stream, watch))
        cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._worker.cancels.watch(job.tenant, job.request_id, cancelled.set_result)
        try:
            ends: set[asyncio.Future[Any]] = {work, cancelled, delivery}
            await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif cancelled.done():
                raise CancelledRequestError(
                    f"request {job.request_id} was cancelled: {cancelled.result()}"
                )
            elif delivery.done():
                delivery.result()
                raise EngineRequestError("the answer was ended before it was generated")
            else:
                raise ExpiredError(f"request {job.request_id} ran past its deadline")
        finally:
            self._worker.cancels.unwatch(job.tenant, job.request_id)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _publish_failure(self, job: Job, error: RequestError) -> None:
        await self._worker.publish_terminal(
            job.tenant, job.lane, terminal_of(job.request_id, error, timings=job.timings)
        )

    def _log_end(self, job: Job, error: RequestError | None, stream: Stream) -> None:
        logger.info(
            "job generated" if error is None else f"job failed: {error.code}",
            extra={
                "action": "decode_done" if error is None else "decode_failed",
                "request_id": job.request_id,
                "num_output_token_ids": stream.log.num_token_ids,
            },
        )

    async def _claim(self, request: OpenStream) -> StreamOpened | StreamRefused:
        answer = await self._worker.broker.request(
            subjects.derender_open(self._worker.slug),
            wire.encode(request),
            timeout_s=CLAIM_TIMEOUT_S,
        )
        try:
            return wire.decode(answer, StreamOpened, StreamRefused)
        except WireError as error:
            raise NoWorkerError(f"unreadable answer from derender: {error}") from None

    def _link_to(self, derender_instance: str) -> FrameLink:
        """Return the link to a derender worker, one for all streams."""
        if derender_instance not in self._links:

            async def send(frame: Frame) -> None:
                await self._worker.broker.publish(
                    subjects.frames(derender_instance), wire.encode(frame)
                )

            link = FrameLink(
                self._worker.instance,
                derender_instance,
                send,
                now=time.monotonic,
                first_seq=self._last_seqs.pop(derender_instance, 0),
            )
            self._links[derender_instance] = (link, asyncio.create_task(link.run()))
        return self._links[derender_instance][0]

    async def _watch_links(self) -> None:
        """Give up derender workers that said goodbye, fell silent, or acknowledge nothing."""
        alive: set[str] = set()
        while True:
            await asyncio.sleep(LINK_CHECK_S)
            before, alive = alive, {worker.instance for worker in self._worker.table.workers()}
            for instance, (link, task) in list(self._links.items()):
                if not self._worker.broker.is_connected:
                    link.pause()
                elif (
                    link.is_stalled or task.done() or (instance in before and instance not in alive)
                ):
                    self._give_up_link(instance, link, task)
                else:
                    await link.probe()

    def _give_up_link(self, instance: str, link: FrameLink, task: asyncio.Task[None]) -> None:
        logger.warning(
            "derender worker %s is lost, its %d streams move",
            instance,
            link.num_streams,
            extra={"action": "derender_lost", "worker": instance},
        )
        del self._links[instance]
        self._last_seqs[instance] = link.seq
        while len(self._last_seqs) > MAX_LINKS_REMEMBERED:
            del self._last_seqs[next(iter(self._last_seqs))]
        task.cancel()
        link.fail()

    def _on_control(self, received: Received) -> None:
        try:
            message = wire.decode(
                received.payload, Credit, Resync, StopChoice, StreamDone, StreamUnknown
            )
        except WireError as error:
            logger.warning(
                "unreadable control message: %s", error, extra={"action": "control_unreadable"}
            )
            return
        if isinstance(message, Credit):
            link = self._links.get(message.derender_instance)
            if link is not None:
                link[0].credit(message.seq)
            return
        stream = self._streams.get(message.stream_id)
        if stream is None:
            return
        if isinstance(message, StopChoice):
            stream.stop(message.choice)
        elif isinstance(message, StreamDone):
            stream.done()
        elif isinstance(message, StreamUnknown):
            stream.lost(message.derender_instance)
        else:
            stream.resync(message.index)

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
        }
