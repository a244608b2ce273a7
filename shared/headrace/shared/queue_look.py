"""How long the queues are, as far as this user of the broker may know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from headrace.shared.broker import Broker, DeniedError, Kept, QueueInfo, WorkQueue
from headrace.shared.subjects import Role

STREAMS = sorted({queue.stream for queue in WorkQueue.of_model("-", "-")})
STAGES = {"req": Role.RENDER, "job": Role.DECODE, "pf": Role.PREFILL}  # by a subject's third token

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """One queue as the broker tells of it: what one stage has to do of one model and lane."""

    info: QueueInfo
    oldest: Kept | None = None  #: of those that wait. None: none, or this user may not look at them
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
    """Looks at the queues; what was denied once is not asked for again."""

    def __init__(self, broker: Broker, *, num_taken: int = 0) -> None:
        """`num_taken`: of so many jobs that decode has taken, the messages too."""
        self._admin = broker.admin
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
        return Queue(info=info) if seen is None else seen

    async def _glance(self, stream: str, info: QueueInfo) -> Queue:
        oldest, taken = [], []
        if info.num_waiting:
            first_seq = info.last_delivered + 1
            oldest = await self._admin.first(stream, info.filter_subject, first_seq=first_seq)
        if self._num_taken and info.num_taken and stream.startswith("HR_JOB"):
            taken = await self._admin.first(stream, info.filter_subject, num=self._num_taken)
        return Queue(
            info=info,
            oldest=oldest[0] if oldest else None,
            first_taken=[kept for kept in taken if kept.sequence <= info.last_delivered],
        )
