"""How long the queues are, as far as this user of the broker may know."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from headrace.shared.broker import Admin, Broker, DeniedError, Kept, QueueInfo, WorkQueue
from headrace.shared.messages import Heartbeat
from headrace.shared.subjects import Role, model_slug, pool
from headrace.shared.workers import WorkerTable

STREAMS = sorted({queue.stream for queue in WorkQueue.of_model("-", "-")})
STAGES = {"req": Role.RENDER, "job": Role.DECODE, "pf": Role.PREFILL}  # by a subject's third token

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """One queue as the broker tells of it: what one stage has to do of one model and lane."""

    info: QueueInfo
    oldest_s: float | None = (
        None  #: how long the oldest one waits. None: none does, or nobody tells
    )
    first_taken: Sequence[Kept] = ()  #: of those that are taken and not settled

    @property
    def stage(self) -> Role:
        """Who takes from it."""
        return STAGES[self._parts[2]]

    @property
    def model(self) -> str:
        """The token in the subject: a model, or a model and the contract that its workers share."""
        return self._parts[4] if self._parts[2] == "req" else self._parts[3]

    @property
    def lane(self) -> str:
        """Its lane, or the one worker that it is for."""
        return self._parts[-1]

    @property
    def _parts(self) -> list[str]:
        return self.info.filter_subject.split(".")


class QueueEye:
    """Looks at the queues; what was denied once is not asked for again.

    A user that may not read what waits has its age from the workers that take it.
    """

    def __init__(self, broker: Broker, workers: WorkerTable, *, num_taken: int = 0) -> None:
        """`num_taken`: of so many jobs that decode has taken, the messages too."""
        self._admin = broker.admin
        self._workers = workers
        self._num_taken = num_taken
        self._denied: set[str] = set()

    @property
    def sees_messages(self) -> bool:
        """Whether this user may look at what waits and what is taken, as far as was tried."""
        return "messages" not in self._denied

    async def look(self) -> list[Queue] | None:
        """Return every queue; None: this user may not know of any. Raises: BrokerError when it is away."""
        queues: list[Queue] = []
        may_know = False
        for stream in STREAMS:
            infos = await self.if_allowed(stream, partial(self._admin.queues, stream))
            may_know |= infos is not None
            queues += [await self._queue(stream, info) for info in infos or ()]
        return queues if may_know else None

    async def if_allowed(self, what: str, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Return the answer, or None where this user may not ask; then it is asked no more."""
        if what in self._denied:
            return None
        try:
            return await ask()
        except DeniedError:
            self._denied.add(what)
            return None

    async def _queue(self, stream: str, info: QueueInfo) -> Queue:
        seen = await self.if_allowed("messages", partial(self._glance, stream, info))
        return self._told(Queue(info=info)) if seen is None else seen

    async def _glance(self, stream: str, info: QueueInfo) -> Queue:
        oldest = await oldest_waiting(self._admin, stream, info)
        taken = []
        if self._num_taken and info.num_taken and stream.startswith("HR_JOB"):
            taken = await self._admin.first(stream, info.filter_subject, num=self._num_taken)
        return Queue(
            info=info,
            oldest_s=None if oldest is None else age_s(oldest),
            first_taken=[kept for kept in taken if kept.sequence <= info.last_delivered],
        )

    def _told(self, queue: Queue) -> Queue:
        if not queue.info.num_waiting:
            return queue
        waits_s = [
            wait_s
            for beat in self._workers.workers()
            if beat.role is queue.stage and queue.model in tokens_of(beat)
            for lane, wait_s in beat.oldest_wait_s.items()
            if lane == queue.lane
        ]
        return replace(queue, oldest_s=max(waits_s, default=None))


async def oldest_waiting(admin: Admin, stream: str, info: QueueInfo) -> Kept | None:
    """Return the message that has waited longest to be taken, if one waits. Raises: DeniedError, BrokerError."""
    if not info.num_waiting:
        return None
    found = await admin.first(stream, info.filter_subject, first_seq=info.last_delivered + 1)
    return found[0] if found else None


def age_s(kept: Kept) -> float:
    """Return for how long the broker has had a message (seconds)."""
    return max(0.0, time.time() - kept.stored)


def tokens_of(beat: Heartbeat) -> tuple[str, str]:
    """Return what stands for a worker's model in subjects: by itself, and together with its contract."""
    slug = model_slug(beat.model)
    return slug, pool(slug, beat.contract)
