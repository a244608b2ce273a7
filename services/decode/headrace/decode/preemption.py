"""Which job is given back when a person waits and no slot is free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.decode.owned import Owned
from headrace.decode.stream import Stream
from headrace.shared.subjects import Lane

CONTINUABLE_S = 300.0
"""A streamed answer is taken up again from what `HR_OUT` holds of it, which it keeps for 15 minutes. So much of them
may have passed; in the others the job has to find its next worker. Of a continuation nobody knows how much has."""


@dataclass(frozen=True, slots=True)
class _Running:
    owned: Owned
    stream: Stream
    since: float


class Preemption:
    """Knows the `bulk` jobs that generate, and gives back the one with the least progress.

    None of whose answer somebody has seen a part that the next worker could not go on behind.
    """

    def __init__(
        self, on_possible: Callable[[], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_possible` is called when one more job may be given back."""
        self._on_possible = on_possible
        self._now = now
        self._running: dict[Owned, _Running] = {}

    @contextlib.contextmanager
    def running(self, owned: Owned, stream: Stream) -> Iterator[None]:
        """Let the job be preempted while the block runs, if it is of the lane `bulk`."""
        if owned.job.lane is Lane.BULK:
            self._running[owned] = _Running(owned, stream, self._now())
            self._on_possible()
        try:
            yield
        finally:
            self._running.pop(owned, None)

    def is_possible(self) -> bool:
        """Whether some job may be given back."""
        return any(map(self._may_preempt, self._running.values()))

    def preempt(self) -> None:
        """Give a job back, if that is possible; its slots come free once the engine has let it go."""
        # Of equals the one that came last: the others were here first.
        running = [job for job in reversed(self._running.values()) if self._may_preempt(job)]
        if running:
            victim = min(running, key=lambda job: job.stream.log.num_token_ids)
            del self._running[victim.owned]
            victim.owned.give_back()

    def _may_preempt(self, job: _Running) -> bool:
        stream = job.stream
        if not job.owned.job.stream or len(stream.log) == 0:
            return True  # nobody has seen a part of it
        is_stored = not stream.is_continuation and self._now() - job.since < CONTINUABLE_S
        return stream.keeps_entries and is_stored
