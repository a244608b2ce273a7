"""The ends of streams: the terminal is published, then decode is told; decode asks again until this went well."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from headrace.derender.control import Control
from headrace.derender.handler import StreamHandler
from headrace.derender.steps import Steps, StreamKey
from headrace.shared import metrics, spans, wire
from headrace.shared.ends import publish_end
from headrace.shared.errors import BrokerError, EngineRequestError, RequestError
from headrace.shared.messages import Chunk, StreamEnd, Terminal
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

MAX_DONE_REMEMBERED = 10_000


class Endings:
    """Which streams are being ended, have failed, or are done."""

    def __init__(
        self,
        worker: Worker,
        steps: Steps,
        control: Control,
        *,
        is_live: Callable[[StreamKey, StreamHandler], bool],
        forget: Callable[[StreamKey], None],
    ) -> None:
        """`forget` is told of a stream whose terminal is published."""
        self._worker = worker
        self._steps = steps
        self._control = control
        self._is_live = is_live
        self._forget = forget
        self._failed: dict[StreamKey, RequestError] = {}
        self._closing: dict[StreamKey, asyncio.Task[None]] = {}
        self._done: OrderedDict[StreamKey, None] = OrderedDict()

    def closing(self, key: StreamKey) -> asyncio.Task[None] | None:
        """Return what ends a stream right now. None: nothing does."""
        return self._closing.get(key)

    def has_failed(self, key: StreamKey) -> bool:
        """Whether a stream can only end with an error."""
        return key in self._failed

    def is_done(self, key: StreamKey) -> bool:
        """Whether a stream was ended here."""
        return key in self._done

    def forget(self, key: StreamKey) -> None:
        """Forget that a stream has failed."""
        self._failed.pop(key, None)

    async def fail(self, key: StreamKey, stream: StreamHandler, error: Exception) -> None:
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
            await self._control.stop(key, choice)

    def begin(self, key: StreamKey, stream: StreamHandler, end: StreamEnd) -> None:
        """End a stream, unless that is under way."""
        if key in self._closing:
            return
        closing = asyncio.create_task(self._close(key, stream, end))
        self._closing[key] = closing
        closing.add_done_callback(lambda closing: self._closed(key, stream, closing))

    def _closed(self, key: StreamKey, stream: StreamHandler, closing: asyncio.Task[None]) -> None:
        """What no check foresaw must not leave the request without an end: decode asks again, and gets an error."""
        self._closing.pop(key, None)
        if closing.cancelled() or closing.exception() is None:
            return
        logger.error(
            "the end of an answer made this worker fail",
            exc_info=closing.exception(),
            extra={"action": "unexpected_error", "request_id": stream.job.request_id},
        )
        if self._is_live(key, stream):
            self._failed[key] = EngineRequestError("this answer made derender fail")

    async def _close(self, key: StreamKey, stream: StreamHandler, end: StreamEnd) -> None:
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
                    await publish_chunk(self._worker, stream, chunk)
                await publish_end(self._worker, job, terminal)
            except RequestError as error:  # too large for the broker: the error that says so is not
                terminal = stream.fail(end, error)
                await publish_end(self._worker, job, terminal)
            self._forget(key)
            self._done[key] = None
            while len(self._done) > MAX_DONE_REMEMBERED:
                self._done.popitem(last=False)
            await self._control.done(key)
        except (BrokerError, RequestError) as error:
            logger.warning(
                "terminal not published yet: %s",
                error,
                extra={"action": "terminal_retry", "request_id": job.request_id},
            )
            return
        self._tell_of(stream, terminal)

    def _tell_of(self, stream: StreamHandler, terminal: Terminal) -> None:
        """Count, trace and log an answer that has ended."""
        metrics.derendered(terminal.timings)
        spans.derendered(
            self._worker.tracer,
            stream.job,
            terminal.timings,
            start=stream.opened,
            end=time.time(),
            error=None if terminal.status == "ok" else terminal.status,
        )
        logger.info(
            "answer ended: %s",
            terminal.status,
            extra={
                "action": "derender_done",
                "request_id": terminal.request_id,
                "status": terminal.status,
                "timings": msgspec.to_builtins(terminal.timings),
            },
        )


async def publish_chunk(worker: Worker, stream: StreamHandler, chunk: Chunk) -> None:
    """Publish a part of an answer. Raises: as `Broker.publish`."""
    await worker.outbox.publish(stream.out, wire.encode(chunk))
