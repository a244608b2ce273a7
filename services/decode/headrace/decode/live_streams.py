"""The streams of the jobs that run here, and what derender workers say of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.decode.links import Links
from headrace.decode.owned import Owned
from headrace.decode.ownership import Ownership
from headrace.decode.stream import Stream
from headrace.decode.takeover import Start
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import NoWorkerError, WireError
from headrace.shared.messages import (
    Credit,
    OpenStream,
    Resync,
    StopChoice,
    StreamDone,
    StreamOpened,
    StreamRefused,
    StreamUnknown,
)
from headrace.shared.tasks import spawn
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 2.0


class LiveStreams:
    """Opens a stream for each job, and hands each control message to the stream that it is about."""

    def __init__(self, worker: Worker, links: Links, ownership: Ownership) -> None:
        self._worker = worker
        self._links = links
        self._ownership = ownership
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen to derender workers. Raises: BrokerError."""
        await self._worker.broker.subscribe(subjects.ctl(self._worker.instance), self._on_control)

    def close(self) -> None:
        """End what is still to be said."""
        for task in self._tasks:
            task.cancel()

    @contextmanager
    def open(
        self, owned: Owned, start: Start, *, keeps_entries: bool, hand_back: str
    ) -> Iterator[Stream]:
        """Have a stream for a job while the block runs; its parameters are those of `Stream`."""
        stream = Stream(
            owned.job,
            next(self._ids),
            start=start,
            keeps_entries=keeps_entries,
            hand_back=hand_back,
            decode_instance=self._worker.instance,
            claim=self._claim,
            link_to=self._links.to,
        )
        self._streams[stream.stream_id] = stream
        try:
            yield stream
        finally:
            del self._streams[stream.stream_id]
            if owned.is_given_back and stream.derender_instance:
                self._tell_gone(stream.derender_instance, stream.stream_id)

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
            self._links.credit(message)
            return
        stream = self._streams.get(message.stream_id)
        if isinstance(message, Resync) and message.derender_instance:
            if stream is None or not stream.is_with(message.derender_instance):
                self._tell_gone(message.derender_instance, message.stream_id)
                return
        if stream is None:
            return
        if isinstance(message, StopChoice):
            stream.stop(message.choice)
        elif isinstance(message, StreamDone):
            stream.done()
        elif isinstance(message, StreamUnknown):
            spawn(self._on_unknown(stream, message.derender_instance), self._tasks)
        else:
            stream.resync(message.index)

    def _tell_gone(self, derender_instance: str, stream_id: int) -> None:
        spawn(self._links.tell_gone(derender_instance, stream_id), self._tasks)

    async def _on_unknown(self, stream: Stream, derender_instance: str) -> None:
        """A derender worker has dropped the stream: because of a takeover, or it has to be claimed again."""
        owned = self._ownership.get(stream.job)
        if owned is None or owned.is_doubted:
            return  # the answer to the first of its frames is enough
        owned.is_doubted = True
        if not await self._ownership.doubt(owned):
            stream.lost(derender_instance)
        owned.is_doubted = False
