"""The derender process: holds live streams, turns frames into answer messages."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from headrace.derender import renderer as renderers
from headrace.derender.control import Control, Credits
from headrace.derender.endings import Endings, publish_chunk
from headrace.derender.handler import StreamHandler, open_s
from headrace.derender.renderer import Derenderer
from headrace.derender.steps import LONG_STEP_S, Steps, StreamKey, Turn, by_stream
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
    Frame,
    OpenStream,
    StreamEnd,
    StreamGone,
    StreamOpened,
    StreamRefused,
    Tokens,
)
from headrace.shared.openai_errors import failure_of
from headrace.shared.owners import announced
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Role
from headrace.shared.tasks import spawn
from headrace.shared.worker import Worker, joined

logger = logging.getLogger(__name__)

QUEUE_GROUP = "derender"
SWEEP_S = 1.0
IDLE_S = 3.0
"""Without an entry for so long, a stream may be another worker's by now: decode is asked."""
ORPHAN_GRACE_S = 30.0
"""A stream is dropped so long after its deadline, should its decode worker never end it."""
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
        self._frames: asyncio.Queue[Frame | StreamGone] = asyncio.Queue()
        self._watched: dict[str, Callable[[], None]] = {}
        self._steps = Steps(is_live=self._is_live, feed=self._feed, end=self._end)
        self._control = Control(worker)
        self._credits = Credits(self._control)
        self._endings = Endings(
            worker, self._steps, self._control, is_live=self._is_live, forget=self._forget
        )
        self._num_opening = 0
        self._replies: set[asyncio.Task[None]] = set()
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
                group.create_task(self._credits.run()),
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
            closing = self._endings.closing(key)
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
            if is_it and stream.claim.epoch < takeover.epoch and self._endings.closing(key) is None:
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
            if self._endings.closing(key) is not None:
                continue
            try:
                # From the first message on: those of an earlier owner are gone with the broker, too.
                again = await self._opened(msgspec.structs.replace(stream.claim, first_seq=0))
            except RequestError as error:
                logger.warning(
                    "answer not begun anew, another worker has to: %s",
                    error,
                    extra={"action": "replay_failed", "request_id": stream.job.request_id},
                )
                if self._streams.get(key) is stream and self._endings.closing(key) is None:
                    self._forget(key)
                    await self._unknown(key)
                continue
            if self._streams.get(key) is stream and self._endings.closing(key) is None:
                self._streams[key] = again
                await self._control.ask_again(key, 0)

    async def _work_off(self) -> None:
        """Work off the frames one by one: the order of a stream's messages is the order of its entries."""
        while True:
            frame = await self._frames.get()
            if isinstance(frame, StreamGone):
                key = (frame.decode_instance, frame.stream_id)
                if self._endings.closing(key) is None:
                    self._forget(key)
                continue
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
            await self._credits.worked_off(frame)
            await asyncio.sleep(0)

    async def _feed(
        self, key: StreamKey, stream: StreamHandler, entries: list[Tokens], expected_s: float
    ) -> None:
        if self._endings.has_failed(key) or self._endings.closing(key) is not None:
            return
        if expected_s <= LONG_STEP_S:
            worked = stream.work_off(entries)
        else:
            worked = await self._steps.run(expected_s, stream.work_off, entries)
        if self._streams.get(key) is not stream:
            return
        try:
            for step in worked.steps:
                if step.chunk is not None:
                    await publish_chunk(self._worker, stream, step.chunk)
                if step.stopped is not None:
                    await self._control.stop(key, step.stopped)
        except RequestError as error:  # too large for the broker: this answer can't be sent
            await self._endings.fail(key, stream, error)
            return
        if worked.error is not None:
            await self._endings.fail(key, stream, worked.error)
        elif worked.has_gap:
            await self._resync(key, stream)

    async def _end(self, key: StreamKey, stream: StreamHandler, end: StreamEnd) -> None:
        if stream.next_index < end.num_entries and not self._endings.has_failed(key):
            await self._resync(key, stream)
        else:
            self._endings.begin(key, stream, end)

    async def _unknown(self, key: StreamKey) -> None:
        """Answer a stream that is not held here: done already, or never opened."""
        if self._endings.is_done(key):
            await self._control.done(key)
        else:
            await self._control.unknown(key)

    async def _resync(self, key: StreamKey, stream: StreamHandler) -> None:
        if stream.wants_resync():
            await self._control.ask_again(key, stream.next_index)

    async def _sweep(self) -> None:
        """Drop streams that nobody will end any more: their decode worker is gone, or their time is over."""
        known: set[str] = set()
        while True:
            await asyncio.sleep(SWEEP_S)
            alive = {worker.instance for worker in self._worker.table.workers()}
            gone = known - alive if self._worker.broker.is_connected else set()
            known = alive | (known - gone)
            for key, stream in list(self._streams.items()):
                if self._endings.closing(key) is not None:
                    continue
                if key[0] in gone or time.time() > stream.job.deadline + ORPHAN_GRACE_S:
                    self._forget(key)
                elif not self._steps.is_busy(stream) and stream.has_been_idle(IDLE_S):
                    await self._control.ask_again(key, stream.next_index)
            for decode in gone:
                if (unwatch := self._watched.pop(decode, None)) is not None:
                    unwatch()
                self._credits.forget(decode)

    def _is_live(self, key: StreamKey, stream: StreamHandler) -> bool:
        return self._streams.get(key) is stream

    def _forget(self, key: StreamKey) -> None:
        self._streams.pop(key, None)
        self._endings.forget(key)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._streams and not self._num_opening:
            self._empty.set()
