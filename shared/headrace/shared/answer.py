"""One answer as it arrives: put in order, each part once, and what was lost read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headrace.shared.alarm import Alarm
from headrace.shared.errors import (
    AnswerLostError,
    BrokerError,
    ExpiredError,
    HeadraceError,
)
from headrace.shared.messages import Chunk, Takeover, Terminal
from headrace.shared.owners import Owners, message_of

if TYPE_CHECKING:
    from headrace.shared.broker import Received

logger = logging.getLogger(__name__)

MAX_REPLAYS_OF_A_GAP = 3
SEQUENCE_HEADER = "Nats-Sequence"
"""Only what was read from the stream has it."""

Replay = Callable[[str], Awaitable["list[Received]"]]
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Pace(Protocol):
    """How soon what was captured is read when nothing comes; in seconds."""

    @property
    def silence_s(self) -> float:
        """Without a message, until what was captured is read; doubles up to the next."""

    @property
    def max_silence_s(self) -> float:
        """A long queue must not make every waiting request read all the time."""


class Answer:
    """The messages on one `out` subject.

    They come by core NATS, which loses messages silently while the broker restarts; all of them are captured
    for a while as well. `replay` reads what was captured: after a gap, after a reconnect, after silence, and
    when a message comes of an owner that nobody told of. Which owner's messages count is `Owners`' to say.
    """

    def __init__(
        self,
        subject: str,
        *,
        replay: Replay,
        spawn: Spawn,
        pace: Pace,
        first_seq: int | None = 0,
        given: Mapping[int, int] | None = None,
    ) -> None:
        """`first_seq`: the first message that is wanted; None: the terminal alone.

        `given`: what the client got before, elsewhere: epoch → the last number of it.
        """
        self.subject = subject
        self.terminal: Terminal | None = None  #: the first one that came; None: none did
        self.ended = asyncio.Event()  #: set with the terminal, whatever is missing before it
        self._replay = replay
        self._spawn = spawn
        self._pace = pace
        self._chunks: dict[int, Chunk] = {}
        self._wants_chunks = first_seq is not None
        self._next_seq = first_seq or 0
        self._owners = Owners()
        self._given = dict(given or {})  # epoch → the last number of it that the client got
        self._stray: Terminal | None = None  # of an owner that nobody has told of yet
        self._announced = (
            Owners()
        )  # of takeovers that came live: the broker delivers refused ones, too
        self._failure: HeadraceError | None = None
        self._now = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._alarm = Alarm(self._wake)
        self._pause_s = pace.silence_s
        self._replay_at = self._now() + self._pause_s
        self._replaying = False
        self._is_reading_in_vain = False  # what is wanted may have been stored since it began
        self._gap_seq = -1
        self._num_replays_of_gap = 0

    def receive(self, received: Received) -> None:
        """Take one message, live or captured; what was there before, or does not count, is dropped."""
        message = message_of(received)
        if message is None:
            return
        is_captured = SEQUENCE_HEADER in received.headers
        if isinstance(message, Takeover):
            if not is_captured:
                self._hear_of(message)
                return
            self._take_over(message)
        elif not self._take_in(message, is_captured=is_captured):
            return
        if not self._has_gap():  # else what goes on behind the gap would put off its replay
            self._pause_s = self._pace.silence_s
            self._replay_at = self._now() + self._pause_s
        self._wake.set()

    def reread(self) -> None:
        """Read what was captured, soon: the connection was away."""
        self._replay_at = self._now()
        self._is_reading_in_vain = self._is_reading_in_vain or self._replaying
        self._wake.set()

    def fail(self, error: HeadraceError) -> None:
        """Make `next` raise `error`, now and ever after; the first one stays."""
        self._failure = self._failure or error
        self._wake.set()

    def close(self) -> None:
        """Nobody calls `next` any more."""
        self._alarm.cancel()

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
            self._alarm.set(until if self._replaying else min(until, self._replay_at))
            await self._wake.wait()

    def _hear_of(self, takeover: Takeover) -> None:
        """Trust nothing that it would void until what was stored is read: that and in which order decides."""
        if not self._owners.has(takeover):
            self._announced.take_over(takeover)
            self._drop_void(self._announced)
            self.reread()

    def _drop_void(self, owners: Owners) -> None:
        self._chunks = {
            seq: chunk for seq, chunk in self._chunks.items() if not owners.is_void(chunk)
        }
        if self.terminal is not None and owners.is_void(self.terminal):
            self.terminal = None
            self.ended.clear()

    def _take_over(self, takeover: Takeover) -> None:
        """Drop what it voids. What the client has got can't be dropped: another text may not follow it."""
        self._owners.take_over(takeover)
        self._drop_void(self._owners)
        if any(self._owners.voids(epoch, seq) for epoch, seq in self._given.items()):
            self.fail(_mixed())

    def _take_in(self, message: Chunk | Terminal, *, is_captured: bool) -> bool:
        """Keep a message that counts; return whether it is one, and new."""
        if self._owners.is_void(message):
            return False
        if not is_captured and self._announced.is_void(message):
            self.reread()
            return False
        if self._owners.is_stranger(message):
            if isinstance(message, Terminal):
                self._stray = message
            self.reread()
            return False
        if isinstance(message, Terminal):
            if self.terminal is not None:
                return False
            self.terminal = message
            self.ended.set()
        elif message.seq < self._next_seq or message.seq in self._chunks:
            return False
        elif self._wants_chunks:
            self._chunks[message.seq] = message
        self._owners.heard(message)
        return True

    def _judge_stray(self) -> None:
        """End with what came of an owner whose takeover is not even captured; an answer of its own is no end."""
        stray, self._stray = self._stray, None
        if stray is None or self.terminal is not None or not self._owners.is_stranger(stray):
            return
        if stray.status == "ok":
            self.fail(_mixed())
            return
        self.terminal = stray
        self.ended.set()

    def _take(self) -> list[Chunk | Terminal]:
        ready: list[Chunk | Terminal] = []
        while (chunk := self._chunks.pop(self._next_seq, None)) is not None:
            ready.append(chunk)
            self._given[chunk.epoch] = self._next_seq
            self._next_seq += 1
        if ready:
            self._num_replays_of_gap = 0
        if not self._has_gap():
            if self.terminal is not None:
                ready.append(self.terminal)
            return ready
        if not ready and self._num_replays_of_gap >= MAX_REPLAYS_OF_A_GAP:
            return [self._end_of_a_lost_answer()]
        return ready

    def _has_gap(self) -> bool:
        """Whether something is known to be missing. A failed request's terminal may not know the count."""
        if self._next_seq in self._chunks or not self._wants_chunks:
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
            self._judge_stray()
            if had_gap and self._has_gap():
                self._num_replays_of_gap += 1
        finally:
            self._replaying = False
            if self._is_reading_in_vain:
                self._is_reading_in_vain, self._replay_at = False, self._now()
            else:
                self._replay_at = self._now() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._pace.max_silence_s)
            self._wake.set()


def _mixed() -> AnswerLostError:
    return AnswerLostError(
        "two workers answered this request, and the one whose answer had begun did not end it"
    )
