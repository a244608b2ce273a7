"""One stream: token IDs in, numbered answer messages out; knows no broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.derender.renderer import AnswerStream
from headrace.shared import token_ids
from headrace.shared.errors import RequestError
from headrace.shared.messages import Chunk, Job, StreamEnd, Terminal, Tokens
from headrace.shared.openai_errors import error_of
from headrace.shared.worker import terminal_of

RESYNC_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one entry brought about."""

    chunk: Chunk | None = None  #: to publish
    stopped: int | None = None  #: the choice in which a stop string was found


class StreamHandler:
    """Feeds one answer. Entries must come in order; a gap is reported, a repeated entry ignored."""

    def __init__(
        self,
        job: Job,
        answer: AnswerStream,
        *,
        instance: str,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.job = job
        self.next_index = 0
        self._answer = answer
        self._instance = instance
        self._now = now
        self._clock = clock
        self._cpu = cpu
        self._cpu_s = 0.0
        self._seq = 0
        self._resync_at = 0.0
        self._closed: tuple[Chunk | None, Terminal] | None = None

    def feed(self, entry: Tokens) -> Step:
        """Take the next entry, whose index must be `next_index`.

        Raises: RequestError when the answer can't be made from these token IDs.
        """
        self.next_index += 1
        started = self._cpu()
        fed = self._answer.feed(
            entry.choice,
            token_ids.unpack(entry.token_ids),
            finish_reason=entry.finish_reason,
            stop_reason=entry.stop_reason,
            logprobs=entry.logprobs,
        )
        self._cpu_s += self._cpu() - started
        chunk = self._chunk(fed.chunks) if fed.chunks else None
        return Step(chunk=chunk, stopped=entry.choice if fed.stopped else None)

    def wants_resync(self) -> bool:
        """Return whether to ask for the missing entries now: once a gap, and again after `RESYNC_S`."""
        now = self._clock()
        if now - self._resync_at < RESYNC_S:
            return False
        self._resync_at = now
        return True

    def close(self, end: StreamEnd) -> tuple[Chunk | None, Terminal]:
        """Return the last chunk message, if any, and the terminal; the same again when asked again.

        Raises: RequestError when the answer can't be made.
        """
        if self._closed is None:
            self._closed = self._close(end)
        return self._closed

    def _close(self, end: StreamEnd) -> tuple[Chunk | None, Terminal]:
        if end.failure is not None:
            return None, self._failed(end, error_of(end.failure))
        started = self._cpu()
        closed = self._answer.close()
        self._cpu_s += self._cpu() - started
        chunk = self._chunk(closed.chunks) if closed.chunks else None
        terminal = Terminal(
            request_id=self.job.request_id,
            seq=self._seq,
            status="ok",
            http_status=200,
            body=closed.body,
        )
        return chunk, self._stamped(terminal, end)

    def fail(self, end: StreamEnd, error: RequestError) -> Terminal:
        """Return the terminal of an answer that derender itself could not make."""
        return self._failed(end, error)

    def _failed(self, end: StreamEnd, error: RequestError) -> Terminal:
        terminal = terminal_of(self.job.request_id, error, seq=self._seq)
        if end.failure is not None:
            terminal = msgspec.structs.replace(terminal, status=end.status)
        return self._stamped(terminal, end)

    def _chunk(self, chunks: tuple[bytes, ...]) -> Chunk:
        chunk = Chunk(request_id=self.job.request_id, seq=self._seq, chunks=chunks)
        self._seq += 1
        return chunk

    def _stamped(self, terminal: Terminal, end: StreamEnd) -> Terminal:
        accepted = end.timings.accepted
        timings = msgspec.structs.replace(
            end.timings,
            derender_s=self._cpu_s,
            total_s=None if accepted is None else self._now() - accepted,
            workers={**end.timings.workers, "derender": self._instance},
        )
        return msgspec.structs.replace(terminal, timings=timings)
