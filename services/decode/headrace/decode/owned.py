"""The jobs that this worker owns, until another worker takes one over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.shared.messages import Job

ABSENT_S = 3.0
"""A process that did not run for so long may have lost its jobs to others: the shortest `ack_wait` is longer."""

JobKey = tuple[str, str]
"""Tenant and request ID."""


@dataclass(eq=False, kw_only=True, slots=True)
class Owned:
    """One job in this worker's hands."""

    job: Job
    epoch: int  #: as which owner
    num_absences: int  #: those after which it was this worker's still
    task: asyncio.Task[None]  #: what works on it
    superseded_by: int = 0  #: the owner that has taken it over; 0: nobody has
    is_doubted: bool = False  #: whether that is so is being read
    is_given_back: bool = False  #: it goes back to its queue, for a job that is more urgent
    ended: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )  #: True once the job is acked, False when it is not this worker's any more

    @property
    def is_superseded(self) -> bool:
        """Whether another worker has taken it over."""
        return self.superseded_by > 0

    @property
    def is_kept(self) -> bool:
        """Whether this worker is going to end it, as far as is known."""
        return not (self.is_superseded or self.is_given_back or self.ended.done())

    def supersede(self, epoch: int) -> None:
        """Let go of the job at once: nothing more of it is published, and it is not acked."""
        if not self.is_superseded:
            self.task.cancel()
        self.superseded_by = max(epoch, self.superseded_by)

    def give_back(self) -> None:
        """Let go of the job, so that a worker with a free slot gets it."""
        if not self.is_superseded:
            self.is_given_back = True
            self.task.cancel()


class Absences:
    """Counts how often this process was away: stopped as by SIGSTOP, or cut off from the broker."""

    def __init__(
        self, num_losses: Callable[[], int], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`num_losses` counts how often the broker was lost."""
        self._num_losses = num_losses
        self._now = now
        self._ran_at = now()
        self._num_stops = 0

    def count(self) -> int:
        """Return how many there were; asked for more often than every `ABSENT_S` while the process runs."""
        now = self._now()
        if now - self._ran_at > ABSENT_S:
            self._num_stops += 1
        self._ran_at = now
        return self._num_stops + self._num_losses()
