"""One answer as it arrives: put in order, each part once, and what was lost read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from headrace.gateway.errors import AnswerLostError
from headrace.gateway.pace import Pace
from headrace.shared import wire
from headrace.shared.errors import BrokerError, ExpiredError, RequestError, WireError
from headrace.shared.messages import Chunk, Terminal

if TYPE_CHECKING:
    from headrace.shared.broker import Received

logger = logging.getLogger(__name__)

MAX_REPLAYS_OF_A_GAP = 3

Replay = Callable[[str], Awaitable["list[Received]"]]
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Answer:
    """The messages on one `out` subject.

    They come by core NATS, which loses messages silently while the broker restarts; all of them are captured
    for a while as well. `replay` reads what was captured: after a gap, after a reconnect, and after silence.
    """

    def __init__(self, subject: str, *, replay: Replay, spawn: Spawn, pace: Pace) -> None:
        self.subject = subject
        self.terminal: Terminal | None = None  #: the first one that came; None: none did
        self.ended = asyncio.Event()  #: set with the terminal, whatever is missing before it
        self._replay = replay
        self._spawn = spawn
        self._pace = pace
        self._chunks: dict[int, Chunk] = {}
        self._next_seq = 0
        self._epoch: int | None = None
        self._failure: RequestError | None = None
        self._wake = asyncio.Event()
        self._pause_s = pace.silence_s
        self._replay_at = self._now() + self._pause_s
        self._replaying = False
        self._gap_seq = -1
        self._num_replays_of_gap = 0

    def receive(self, received: Received) -> None:
        """Take one message, live or captured; what was there before is dropped."""
        try:
            message: Chunk | Terminal = wire.decode(received.payload, Chunk, Terminal)
        except WireError as error:
            logger.warning(
                "unreadable answer on %s: %s",
                received.subject,
                error,
                extra={"action": "answer_unreadable", "subject": received.subject},
            )
            return
        if isinstance(message, Terminal):
            if self.terminal is not None:
                return
            self.terminal = message
            self.ended.set()
        elif self._is_of_another_owner(message):
            return
        elif message.seq < self._next_seq or message.seq in self._chunks:
            return
        else:
            self._chunks[message.seq] = message
        if not self._has_gap():  # else what goes on behind the gap would put off its replay
            self._pause_s = self._pace.silence_s
            self._replay_at = self._now() + self._pause_s
        self._wake.set()

    def reread(self) -> None:
        """Read what was captured, soon: the connection was away."""
        self._replay_at = self._now()
        self._wake.set()

    def fail(self, error: RequestError) -> None:
        """Make `next` raise `error`, now and ever after; the first one stays."""
        self._failure = self._failure or error
        self._wake.set()

    async def next(self, until: float) -> list[Chunk | Terminal]:
        """Wait for the next messages in order and return all that are there; a terminal is the last one.

        `until` is a time of the event loop's clock.
        Raises: ExpiredError at `until`, AnswerLostError, or what `fail` was given.
        """
        while True:
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            ready = self._take()
            if ready:
                return ready
            if self._now() >= until:
                raise ExpiredError("the request is past its deadline; nothing ended it in time")
            self._notice_gap()
            if self._now() >= self._replay_at and not self._replaying:
                self._replaying = True
                self._spawn(self._reread())
            wake_at = until if self._replaying else min(until, self._replay_at)
            try:
                async with asyncio.timeout_at(wake_at):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _take(self) -> list[Chunk | Terminal]:
        ready: list[Chunk | Terminal] = []
        while (chunk := self._chunks.pop(self._next_seq, None)) is not None:
            ready.append(chunk)
            self._next_seq += 1
        if ready:
            self._num_replays_of_gap = 0
        if self.terminal is not None and self._is_of_another_owner(self.terminal):
            if ready:
                return ready
            raise AnswerLostError(
                "two workers answered this request, and the one whose answer had begun did not end it"
            )
        if not self._has_gap():
            if self.terminal is not None:
                ready.append(self.terminal)
            return ready
        if not ready and self._num_replays_of_gap >= MAX_REPLAYS_OF_A_GAP:
            return [self._end_of_a_lost_answer()]
        return ready

    def _is_of_another_owner(self, message: Chunk | Terminal) -> bool:
        """Whether it belongs to another answer than the one that the client has begun to get.

        A worker that was paused and one that took its job over may both answer, each in its own words.
        """
        if isinstance(message, Terminal) and (message.epoch == 0 or message.status != "ok"):
            return False
        if self._epoch is None:
            if isinstance(message, Chunk):
                self._epoch = message.epoch
            return False
        return message.epoch != self._epoch

    def _has_gap(self) -> bool:
        """Whether something is known to be missing. A failed request's terminal may not know the count."""
        if self._next_seq in self._chunks:
            return False
        if self.terminal is None:
            return bool(self._chunks)
        return self.terminal.seq > self._next_seq

    def _notice_gap(self) -> None:
        if self._has_gap() and self._gap_seq != self._next_seq:
            self._gap_seq = self._next_seq
            self._pause_s = self._pace.silence_s
            self._replay_at = self._now()

    def _end_of_a_lost_answer(self) -> Terminal:
        if self.terminal is not None and self.terminal.status != "ok":
            return self.terminal
        known = min(self._chunks, default=self.terminal.seq if self.terminal else self._next_seq)
        raise AnswerLostError(
            f"messages {self._next_seq} to {known - 1} of this answer were lost on the way"
        )

    async def _reread(self) -> None:
        had_gap = self._has_gap()
        try:
            captured = await self._replay(self.subject)
        except BrokerError as error:
            logger.debug(
                "answer not read again: %s",
                error,
                extra={"action": "replay_failed", "subject": self.subject},
            )
        else:
            for received in captured:
                self.receive(received)
            if had_gap and self._has_gap():
                self._num_replays_of_gap += 1
        finally:
            self._replaying = False
            self._replay_at = self._now() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._pace.max_silence_s)
            self._wake.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
