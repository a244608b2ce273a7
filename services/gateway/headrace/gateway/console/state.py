"""What the page shows: workers, queues and the viewer's own requests, made when somebody asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from headrace.gateway import models
from headrace.gateway.link import Link
from headrace.gateway.recent import Recent, Record
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Heartbeat
from headrace.shared.queue_look import Queue, QueueEye, tokens_of
from headrace.shared.subjects import Lane

NUM_REQUESTS = 60
LOOK_S = 1.0  # however many look at the page, the broker is asked this often
LOOK_TIMEOUT_S = 4.0


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """One queue: what one stage has to do of one model and lane, of all tenants."""

    stage: str
    """Who takes from it."""
    model: str
    """Served model name."""
    lane: str
    """How urgent."""
    num_waiting: int
    """Nobody has taken them yet."""
    num_taken: int
    """Taken, and not settled."""
    oldest_s: float | None
    """How long the oldest one waits. None: none does, or no worker is there that would tell."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `GET /console/state`."""

    time: float
    """Unix seconds."""
    version: str
    """Of the gateway."""
    tenant: str
    """Whose requests are shown."""
    needs_key: bool
    """Whether requests need an API key."""
    is_operator: bool
    """Whether hosts and process IDs are shown."""
    is_draining: bool
    """Whether this gateway takes nothing new."""
    num_running: int
    """Clients of this gateway that wait, of every tenant."""
    models: dict[str, Any]
    """As in `GET /ready`."""
    workers: list[dict[str, Any]]
    """As in `GET /workers`."""
    queues: list[QueueRow] | None
    """None: the gateway's user may not know, or the broker is away."""
    requests: list[Record]
    """The viewer's last ones at this gateway, newest first."""
    trouble: str
    """Why there is less to see than usual. Empty: there is not."""


class Console:
    """Makes the state; what all viewers share is looked at once a second at most, and only while one asks."""

    def __init__(
        self,
        link: Link,
        recent: Recent,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is a monotonic clock."""
        self._link = link
        self._recent = recent
        self._now = now
        self._eye: QueueEye | None = None
        self._lock = asyncio.Lock()
        self._looked: tuple[float, list[Queue] | None] | None = None

    async def state(self, tenant: str, **about: Any) -> State:
        """Return what `tenant` may see; `about` are the fields that the caller knows."""
        trouble = ""
        queues: list[Queue] | None = None
        beats: list[Heartbeat] = []
        found: dict[str, Any] = {}
        try:
            workers = self._link.workers
            beats = [beat for some in models.served_models(workers).values() for beat in some]
            found = models.readiness(workers)[1]["models"]
            queues = await self._queues()
        except BrokerError as error:
            trouble = str(error)
        return State(
            time=time.time(),
            tenant=tenant,
            models=found,
            workers=models.shown_workers(beats, about["is_operator"]),
            queues=None if queues is None else _rows(queues, beats),
            requests=self._recent.last(tenant, NUM_REQUESTS),
            trouble=trouble,
            **about,
        )

    async def _queues(self) -> list[Queue] | None:
        """Return the queues as of a second ago at most. Raises: BrokerError when the broker is away."""
        async with self._lock:  # whoever comes meanwhile has the same look
            if self._looked is None or self._now() - self._looked[0] >= LOOK_S:
                if self._eye is None:
                    self._eye = QueueEye(self._link.broker, self._link.workers)
                self._looked = None
                try:
                    async with asyncio.timeout(LOOK_TIMEOUT_S):
                        queues = await self._eye.look()
                except TimeoutError:
                    raise BrokerError("the broker did not say how long its queues are") from None
                self._looked = (self._now(), queues)
            return self._looked[1]


def _rows(queues: Iterable[Queue], beats: Sequence[Heartbeat]) -> list[QueueRow]:
    """Return the lanes of the models that are served; lanes of several contracts are one."""
    lanes = [str(lane) for lane in Lane]
    rows: dict[tuple[str, str, str], QueueRow] = {}
    names = {token: beat.model for beat in beats for token in tokens_of(beat)}
    for queue in queues:
        name = names.get(queue.model)
        if name is None or queue.lane not in lanes:
            continue
        key = (str(queue.stage), name, queue.lane)
        before = rows.get(key)
        ages = [queue.oldest_s, before.oldest_s if before else None]
        rows[key] = QueueRow(
            stage=key[0],
            model=name,
            lane=queue.lane,
            num_waiting=queue.info.num_waiting + (before.num_waiting if before else 0),
            num_taken=queue.info.num_taken + (before.num_taken if before else 0),
            oldest_s=max((age for age in ages if age is not None), default=None),
        )
    return sorted(rows.values(), key=lambda row: (row.model, row.stage, lanes.index(row.lane)))
