"""The derender process: holds live streams, turns frames into answer messages."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from headrace.derender import renderer as renderers
from headrace.derender.handler import StreamHandler, open_s
from headrace.derender.renderer import Derenderer
from headrace.derender.steps import Steps, StreamKey, Turn, by_stream
from headrace.shared import subjects, wire
from headrace.shared.asks import answering
from headrace.shared.broker import Received, Subscription
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import (
    BrokerError,
    EngineRequestError,
    NoWorkerError,
    RequestError,
    WireError,
)
from headrace.shared.messages import (
    Chunk,
    Credit,
    Frame,
    OpenStream,
    Resync,
    StopChoice,
    StreamDone,
    StreamEnd,
    StreamGone,
    StreamOpened,
    StreamRefused,
    StreamUnknown,
    Terminal,
    Tokens,
)
from headrace.shared.openai_errors import failure_of
from headrace.shared.owners import announced
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Role
from headrace.shared.tasks import spawn
from headrace.shared.wire import Message
from headrace.shared.worker import Worker, joined

logger = logging.getLogger(__name__)

QUEUE_GROUP = "derender"
CREDIT_FRAMES = 32
"""A credit goes back after so many frames at the latest."""
CREDIT_S = 0.2
"""And so long after a frame at the latest."""
SWEEP_S = 1.0
IDLE_S = 3.0
"""Without an entry for so long, a stream may be another worker's by now: decode is asked."""
ORPHAN_GRACE_S = 30.0
"""A stream is dropped so long after its deadline, should its decode worker never end it."""
MAX_DONE_REMEMBERED = 10_000
GC_THRESHOLDS = (10_000, 10, 10)


async def run(settings: Settings, *, engine: EngineKind, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then until the live streams have ended.

    Raises: HeadraceError when the tokenizer or a parser can't start.
    """
    async with joined(
        settings,
        Role.DERENDER,
        model=served_name(settings),
        contract=contract(settings, engine=engine),
        slots=settings.derender.slots,
        stop=stop,
    ) as worker:
        derenderer = renderers.build(settings, engine)
        await derenderer.start()
        # What was loaded stays. With vLLM a full collection would stop every stream for a third of a second.
        gc.collect()
        gc.freeze()
        # And what lives long is seldom garbage: look through it once in a million objects, not once in ten thousand.
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            async with answering(worker, subjects.derender_ask(worker.slug), derenderer.ask, stop):
                await DerenderService(settings, worker, derenderer).serve(stop)
        finally:
            await derenderer.close()


class DerenderService:
    """Opens streams, works off frames in order, gives credits back."""

    def __init__(self, settings: Settings, worker: Worker, derenderer: Derenderer) -> None:
        self._settings = settings.derender
        self._worker = worker
        self._derenderer = derenderer
        self._streams: dict[StreamKey, StreamHandler] = {}
        self._failed: dict[StreamKey, RequestError] = {}
        self._closing: dict[StreamKey, asyncio.Task[None]] = {}
        self._done: OrderedDict[StreamKey, None] = OrderedDict()
        self._frames: asyncio.Queue[Frame | StreamGone] = asyncio.Queue()
        self._watched: dict[str, Callable[[], None]] = {}
        self._steps = Steps(
            is_live=lambda key, stream: self._streams.get(key) is stream,
            feed=self._feed,
            end=self._end,
        )
        self._num_opening = 0
        self._replies: set[asyncio.Task[None]] = set()
        self._credited: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        worker.describe = lambda: {"num_running": len(self._streams)}

    async def serve(self, stop: asyncio.Event) -> None:
        """Take streams until `stop`, then drain."""
        broker = self._worker.broker
        await broker.subscribe(subjects.frames(self._worker.instance), self._on_frame)
        opens = await broker.subscribe(
            subjects.derender_open(self._worker.slug), self._on_open, queue=QUEUE_GROUP
        )
        await broker.subscribe(subjects.takeover_all(), self._on_takeover)
        broker.on_reconnect(self._replay)
        await self._worker.enter("ready")
        async with asyncio.TaskGroup() as group:
            self._steps.start(group)
            tasks = [
                group.create_task(self._work_off()),
                group.create_task(self._give_credits()),
                group.create_task(self._sweep()),
            ]
            try:
                await stop.wait()
                await self._drain(opens)
            finally:
                for task in tasks:
                    task.cancel()
                self._steps.close()

    async def _drain(self, opens: Subscription) -> None:
        await opens.unsubscribe()
        await self._worker.enter("draining")
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning(
                "%d streams move to another worker after %.0f s (derender.drain_timeout_s)",
                len(self._streams),
                self._settings.drain_timeout_s,
                extra={"action": "derender_drain_timeout"},
            )

    def _on_open(self, received: Received) -> None:
        self._reply(self._open(received))

    def _reply(self, work: Coroutine[Any, Any, None]) -> None:
        spawn(work, self._replies)

    async def _open(self, received: Received) -> None:
        instance = self._worker.instance
        try:
            request = wire.decode(received.payload, OpenStream)
            await self._accept(request)
            answer: StreamOpened | StreamRefused = StreamOpened(derender_instance=instance)
        except RequestError as error:
            answer = StreamRefused(derender_instance=instance, failure=failure_of(error))
        except WireError as error:
            answer = StreamRefused(
                derender_instance=instance, failure=failure_of(EngineRequestError(str(error)))
            )
        except Exception:  # a request that no check foresaw: it must not be claimed again and again
            logger.exception("a claim made this worker fail", extra={"action": "unexpected_error"})
            failure = failure_of(RequestError("this request made derender fail"))
            answer = StreamRefused(derender_instance=instance, failure=failure)
        try:
            await self._worker.broker.respond(received, wire.encode(answer))
        except BrokerError as error:
            logger.warning("claim not answered: %s", error, extra={"action": "claim_lost"})

    async def _accept(self, request: OpenStream) -> None:
        """Hold the stream. Raises: NoWorkerError when another worker should, RequestError when none can."""
        if request.job.contract != self._worker.contract:
            raise NoWorkerError(
                f"the job's contract is {request.job.contract}, this derender worker's is "
                f"{self._worker.contract}"
            )
        if len(self._streams) + self._num_opening >= self._settings.slots:
            raise NoWorkerError(f"all {self._settings.slots} streams are in use (derender.slots)")
        self._num_opening += 1
        self._empty.clear()
        try:
            stream = await self._opened(request)
            self._watch(request.decode_instance)
            self._streams[request.decode_instance, request.stream_id] = stream
        finally:
            self._num_opening -= 1
            self._note_empty()

    async def _opened(self, request: OpenStream) -> StreamHandler:
        job = request.job
        answer = await self._steps.run(open_s(job), self._derenderer.open, job)
        return StreamHandler(job, answer, instance=self._worker.instance, claim=request)

    def _watch(self, decode: str) -> None:
        if decode not in self._watched:
            self._watched[decode] = self._worker.pulse.watch(decode, lambda: self._on_lost(decode))

    def _on_lost(self, decode: str) -> None:
        """Give a killed decode worker's jobs to others at once; what is being ended here is ended first."""
        self._watched.pop(decode, None)
        for key, stream in list(self._streams.items()):
            if key[0] != decode:
                continue
            closing = self._closing.get(key)
            if closing is None:
                self._forget(key)
            self._reply(self._hand_back(stream, after=closing))

    async def _hand_back(self, stream: StreamHandler, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait({after})
        if not stream.claim.hand_back:
            return
        try:
            await self._worker.broker.hand_back(stream.claim.hand_back)
        except BrokerError as error:
            logger.warning(
                "job comes again only after ack_wait: %s",
                error,
                extra={"action": "hand_back_failed", "request_id": stream.job.request_id},
            )

    def _on_takeover(self, received: Received) -> None:
        """Drop what was opened for the owner before: its slot is free, and the job is not given back."""
        takeover = announced(received)
        if takeover is None:
            return
        for key, stream in list(self._streams.items()):
            job = stream.job
            is_it = (job.tenant, job.request_id) == (takeover.tenant, takeover.request_id)
            if is_it and stream.claim.epoch < takeover.epoch and key not in self._closing:
                self._forget(key)

    def _on_frame(self, received: Received) -> None:
        try:
            self._frames.put_nowait(wire.decode(received.payload, Frame, StreamGone))
        except WireError as error:
            logger.warning("unreadable frame: %s", error, extra={"action": "frame_unreadable"})

    async def _replay(self) -> None:
        """Make every live answer again: a broker that was away lost messages, and with them its memory streams.

        The same entries give the same messages with the same numbers, so readers ignore what they have.
        """
        for key, stream in list(self._streams.items()):
            if key in self._closing:
                continue
            # From the first message on: those of an earlier owner are gone with the broker, too.
            again = await self._opened(msgspec.structs.replace(stream.claim, first_seq=0))
            if self._streams.get(key) is stream and key not in self._closing:
                self._streams[key] = again
                await self._ask_again(key, 0)

    async def _work_off(self) -> None:
        """Work off the frames one by one: the order of a stream's messages is the order of its entries."""
        while True:
            frame = await self._frames.get()
            if isinstance(frame, StreamGone):
                if (key := (frame.decode_instance, frame.stream_id)) not in self._closing:
                    self._forget(key)
                continue
            decode = frame.decode_instance
            turn = Turn()
            try:
                for key, items in by_stream(frame).items():
                    stream = self._streams.get(key)
                    if stream is None:
                        await self._unknown(key)
                    else:
                        await self._steps.take(key, stream, items)
                    await turn.give_way()
            except BrokerError as error:
                logger.warning("frame not worked off: %s", error, extra={"action": "frame_failed"})
                continue
            self._seen[decode] = max(frame.seq, self._seen.get(decode, 0))
            is_probe = not frame.tokens and not frame.ends
            if is_probe or self._seen[decode] - self._credited.get(decode, 0) >= CREDIT_FRAMES:
                await self._credit(decode)
            await asyncio.sleep(0)

    async def _feed(
        self, key: StreamKey, stream: StreamHandler, entries: list[Tokens], expected_s: float
    ) -> None:
        if key in self._failed or key in self._closing:
            return
        worked = await self._steps.run(expected_s, stream.work_off, entries)
        if self._streams.get(key) is not stream:
            return
        try:
            for step in worked.steps:
                if step.chunk is not None:
                    await self._publish(stream, step.chunk)
                if step.stopped is not None:
                    await self._tell(key[0], StopChoice(stream_id=key[1], choice=step.stopped))
        except RequestError as error:  # too large for the broker: this answer can't be sent
            await self._fail(key, stream, error)
            return
        if worked.error is not None:
            await self._fail(key, stream, worked.error)
        elif worked.has_gap:
            await self._resync(key, stream)

    async def _fail(self, key: StreamKey, stream: StreamHandler, error: Exception) -> None:
        """Token IDs that make no answer: stop every choice; the stream ends with this error."""
        logger.warning(
            "answer can't be made: %s",
            error,
            extra={"action": "derender_failed", "request_id": stream.job.request_id},
        )
        self._failed[key] = (
            error if isinstance(error, RequestError) else EngineRequestError(str(error))
        )
        for choice in range(len(stream.job.prompts) * stream.job.n):
            await self._tell(key[0], StopChoice(stream_id=key[1], choice=choice))

    async def _end(self, key: StreamKey, stream: StreamHandler, end: StreamEnd) -> None:
        if stream.next_index < end.num_entries and key not in self._failed:
            await self._resync(key, stream)
        elif key not in self._closing:
            closing = asyncio.create_task(self._close(key, stream, end))
            self._closing[key] = closing
            closing.add_done_callback(lambda _: self._closing.pop(key, None))

    async def _close(self, key: StreamKey, stream: StreamHandler, end: StreamEnd) -> None:
        """Publish the terminal, then say so; decode asks again until this went well."""
        failed = self._failed.get(key)
        if failed is not None:
            chunk, terminal = None, stream.fail(end, failed)
        else:
            try:
                chunk, terminal = await self._steps.run(stream.close_s(), stream.close, end)
            except RequestError as error:
                self._failed[key] = error
                chunk, terminal = None, stream.fail(end, error)
        job = stream.job
        try:
            try:
                if chunk is not None:
                    await self._publish(stream, chunk)
                await self._worker.publish_terminal(
                    job.tenant, job.lane, terminal, reply_to=job.reply_to
                )
            except RequestError as error:  # too large for the broker: the error that says so is not
                terminal = stream.fail(end, error)
                await self._worker.publish_terminal(
                    job.tenant, job.lane, terminal, reply_to=job.reply_to
                )
            self._forget(key)
            self._done[key] = None
            while len(self._done) > MAX_DONE_REMEMBERED:
                self._done.popitem(last=False)
            await self._tell(key[0], StreamDone(stream_id=key[1]))
        except (BrokerError, RequestError) as error:
            logger.warning(
                "terminal not published yet: %s",
                error,
                extra={"action": "terminal_retry", "request_id": job.request_id},
            )
            return
        self._log_done(terminal)

    def _log_done(self, terminal: Terminal) -> None:
        logger.info(
            "answer ended: %s",
            terminal.status,
            extra={
                "action": "derender_done",
                "request_id": terminal.request_id,
                "status": terminal.status,
                "cpu_s": round(terminal.timings.derender_s or 0.0, 6),
            },
        )

    async def _unknown(self, key: StreamKey) -> None:
        """Answer a stream that is not held here: done already, or never opened."""
        if key in self._done:
            await self._tell(key[0], StreamDone(stream_id=key[1]))
            return
        await self._tell(
            key[0],
            StreamUnknown(derender_instance=self._worker.instance, stream_id=key[1]),
        )

    async def _resync(self, key: StreamKey, stream: StreamHandler) -> None:
        if stream.wants_resync():
            await self._ask_again(key, stream.next_index)

    async def _ask_again(self, key: StreamKey, index: int) -> None:
        instance = self._worker.instance
        resync = Resync(stream_id=key[1], index=index, derender_instance=instance)
        await self._tell(key[0], resync)

    async def _publish(self, stream: StreamHandler, chunk: Chunk) -> None:
        await self._worker.outbox.publish(
            subjects.out(stream.job.tenant, stream.job.request_id), wire.encode(chunk)
        )

    async def _tell(self, decode: str, message: Message) -> None:
        """Send a control message; decode sends again what brings about one that is lost."""
        try:
            await self._worker.broker.publish(subjects.ctl(decode), wire.encode(message))
        except BrokerError as error:
            logger.warning("control message not sent: %s", error, extra={"action": "control_lost"})

    async def _credit(self, decode: str) -> None:
        seq = self._seen[decode]
        self._credited[decode] = seq
        await self._tell(decode, Credit(derender_instance=self._worker.instance, seq=seq))

    async def _give_credits(self) -> None:
        """Acknowledge the last frames of a burst."""
        while True:
            await asyncio.sleep(CREDIT_S)
            for decode, seq in list(self._seen.items()):
                if seq > self._credited.get(decode, 0):
                    await self._credit(decode)

    async def _sweep(self) -> None:
        """Drop streams that nobody will end any more: their decode worker is gone, or their time is over."""
        known: set[str] = set()
        while True:
            await asyncio.sleep(SWEEP_S)
            alive = {worker.instance for worker in self._worker.table.workers()}
            gone = known - alive if self._worker.broker.is_connected else set()
            known = alive | (known - gone)
            for key, stream in list(self._streams.items()):
                if key in self._closing:
                    continue
                if key[0] in gone or time.time() > stream.job.deadline + ORPHAN_GRACE_S:
                    self._forget(key)
                elif not self._steps.is_busy(stream) and stream.has_been_idle(IDLE_S):
                    await self._ask_again(key, stream.next_index)
            for decode in gone:
                if (unwatch := self._watched.pop(decode, None)) is not None:
                    unwatch()
                self._seen.pop(decode, None)
                self._credited.pop(decode, None)

    def _forget(self, key: StreamKey) -> None:
        self._streams.pop(key, None)
        self._failed.pop(key, None)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._streams and not self._num_opening:
            self._empty.set()
