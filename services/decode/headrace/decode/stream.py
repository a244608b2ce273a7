"""One job's way to its reader: a claimed derender worker, and another when that one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.decode.frames import FrameLink
from headrace.decode.stream_log import StreamLog
from headrace.decode.takeover import Start
from headrace.engine.interface import DecodeOutput
from headrace.shared.alarm import Alarm
from headrace.shared.errors import BrokerError, NoWorkerError
from headrace.shared.messages import Job, OpenStream, StreamEnd, StreamOpened, StreamRefused
from headrace.shared.openai_errors import error_of

logger = logging.getLogger(__name__)

CLAIM_RETRY_S = 0.2
END_RETRY_S = 1.0


class Stream:
    """The answer of one job. `add` never waits: what is not sent yet stays in the log."""

    def __init__(
        self,
        job: Job,
        stream_id: int,
        *,
        start: Start,
        decode_instance: str,
        claim: Callable[[OpenStream], Awaitable[StreamOpened | StreamRefused]],
        link_to: Callable[[str], FrameLink],
        keeps_entries: bool = False,
        hand_back: str = "",
    ) -> None:
        """`keeps_entries` and `hand_back` are those of `OpenStream`."""
        self.job = job
        self.log = StreamLog(stream_id)
        self._first_seq = 0
        if start.continuation is not None:
            self.log.preset(start.continuation.entries)
            self._first_seq = start.continuation.first_seq
        self.end: StreamEnd | None = None
        self._epoch = start.epoch
        self.keeps_entries = keeps_entries
        self._hand_back = hand_back
        self._decode_instance = decode_instance
        self._claim = claim
        self._link_to = link_to
        self._link: FrameLink | None = None
        self._derender_instance = ""
        self._is_lost = False
        self._is_done = False
        self._wake = asyncio.Event()
        self._alarm = Alarm(self._wake)
        self._choices: dict[int, asyncio.Task[Any]] = {}
        self._stopped: set[int] = set()

    @property
    def stream_id(self) -> int:
        """Names the stream between decode and derender."""
        return self.log.stream_id

    @property
    def is_continuation(self) -> bool:
        """Whether it goes on behind what an earlier owner has published."""
        return self._first_seq > 0

    @property
    def derender_instance(self) -> str:
        """The derender worker that holds it, or held it last. Empty: none did yet."""
        return self._derender_instance

    def add(self, choice: int, output: DecodeOutput) -> None:
        """Append what a step gave a choice."""
        self.log.add(choice, output)
        if self._link is not None:
            self._link.notify(self.stream_id)

    def running(self, choice: int, task: asyncio.Task[Any] | None) -> None:
        """Name the task that generates a choice, once it runs, so that a stop string can end it."""
        if task is not None:
            self._choices[choice] = task

    def stop(self, choice: int) -> None:
        """A stop string was found in this choice: its generation ends, the request goes on."""
        self._stopped.add(choice)
        task = self._choices.get(choice)
        if task is not None:
            task.cancel()

    def is_stopped(self, choice: int) -> bool:
        """True when a stop string ended this choice."""
        return choice in self._stopped

    def resync(self, index: int) -> None:
        """The derender worker lacks entries from `index` on."""
        if self._link is not None:
            self._link.resync(self.stream_id, index)

    def lost(self, derender_instance: str) -> None:
        """This derender worker is gone, or does not know the stream; another one may hold it already."""
        if derender_instance == self._derender_instance:
            self._is_lost = True
            self._wake.set()

    def is_with(self, derender_instance: str) -> bool:
        """Whether this derender worker is the one that holds the stream."""
        return derender_instance == self._derender_instance

    def done(self) -> None:
        """The terminal is published."""
        self._is_done = True
        self._wake.set()

    async def deliver(self) -> None:
        """Keep a derender worker claimed until it says that the terminal is published.

        Raises: RequestError when every worker would refuse this request.
        """
        attempt = 0
        try:
            while not self._is_done:
                attempt += 1
                self._is_lost = False
                self._derender_instance = await self._claimed(attempt)
                self._link = self._link_to(self._derender_instance)
                self._link.attach(self)
                await self._until_lost_or_done()
                self._link.detach(self.stream_id)
                self._link = None
        finally:
            self._alarm.cancel()
            if self._link is not None:
                self._link.detach(self.stream_id)
                self._link = None

    def finish(self, end: StreamEnd) -> None:
        """All is generated, or nothing more will be."""
        self.end = end
        if self._link is not None:
            self._link.send_end(self.stream_id)

    async def _claimed(self, attempt: int) -> str:
        """Return the instance of a worker that took the stream."""
        while True:
            request = OpenStream(
                stream_id=self.stream_id,
                attempt=attempt,
                epoch=self._epoch,
                first_seq=self._first_seq,
                keeps_entries=self.keeps_entries,
                hand_back=self._hand_back,
                decode_instance=self._decode_instance,
                job=self.job,
            )
            try:
                answer = await self._claim(request)
            except (NoWorkerError, BrokerError) as error:
                logger.warning(
                    "no derender worker yet: %s",
                    error,
                    extra={"action": "derender_claim_retry", "request_id": self.job.request_id},
                )
                await asyncio.sleep(CLAIM_RETRY_S)
                continue
            if isinstance(answer, StreamOpened):
                return answer.derender_instance
            if not answer.failure.retryable:
                raise error_of(answer.failure)
            await asyncio.sleep(CLAIM_RETRY_S)

    async def _until_lost_or_done(self) -> None:
        now = asyncio.get_running_loop().time
        again_at = now() + END_RETRY_S
        while not (self._is_lost or self._is_done):
            if now() >= again_at:
                again_at = now() + END_RETRY_S
                if self.end is not None and self._link is not None:
                    self._link.send_end(self.stream_id)
            self._wake.clear()
            self._alarm.set(again_at)
            await self._wake.wait()
