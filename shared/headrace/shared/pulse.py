"""Whether a peer is still there: a ping to a process that is gone finds no subscriber, and the broker says so at once.

A peer that is there and slow, or stopped, is not lost: its ping only times out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received
from headrace.shared.errors import BrokerError, NoWorkerError, WireError
from headrace.shared.messages import Ping, Pong
from headrace.shared.tasks import spawn

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
TIMEOUT_S = 1.0
LOST_AFTER = 2
"""Pings in a row that nobody was there for: one alone may meet a peer that is just connecting again."""
RECONNECT_GRACE_S = 3.0
"""After this process was cut off from the broker: its peers were, too, and are on their way back."""

Asker = Callable[[str], Awaitable[None]]
"""Pings one instance. Raises: NoWorkerError when nobody of that name listens, BrokerError when nothing is known."""


@dataclass(eq=False, slots=True)
class _Watched:
    watchers: dict[object, Callable[[], None]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Pulse:
    """Pings the instances that somebody watches, and calls back when one is lost."""

    def __init__(
        self,
        ask: Asker,
        *,
        on_lost: Callable[[str], None] = lambda _: None,
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost` is told each lost instance before its watchers are; `now` is a monotonic clock."""
        self._ask = ask
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._now = now
        self._quiet_until = float("-inf")
        self._watched: dict[str, _Watched] = {}

    def watch(self, instance: str, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Call `on_lost()` once when `instance` is gone; return the function that ends the watch.

        Ending it twice, or after the loss, does nothing.
        """
        watched = self._watched.setdefault(instance, _Watched())
        watcher = object()
        watched.watchers[watcher] = on_lost
        if watched.task is None:
            watched.task = asyncio.create_task(self._follow(instance, watched))

        def end() -> None:
            watched.watchers.pop(watcher, None)
            if not watched.watchers and self._watched.get(instance) is watched:
                self._drop(instance)

        return end

    async def reconnected(self) -> None:
        """Trust no loss for a while: this process was away from the broker."""
        self._quiet_until = self._now() + RECONNECT_GRACE_S

    def stop(self) -> None:
        """End every watch; nobody is called back any more."""
        for instance in list(self._watched):
            self._drop(instance)

    def _drop(self, instance: str) -> None:
        task = self._watched.pop(instance).task
        if task is not None:
            task.cancel()

    async def _follow(self, instance: str, watched: _Watched) -> None:
        """Ping until the peer is lost. The first ping waits, so that what is over soon costs none."""
        num_missed = 0
        while num_missed < LOST_AFTER:
            await asyncio.sleep(self._interval_s)
            try:
                await self._ask(instance)
                num_missed = 0
            except NoWorkerError:
                num_missed = 0 if self._now() < self._quiet_until else num_missed + 1
            except BrokerError:
                num_missed = 0  # no answer in time, or no broker: that proves nothing
        logger.warning("%s is gone", instance, extra={"action": "peer_lost", "worker": instance})
        del self._watched[instance]
        self._on_lost(instance)
        for call in list(watched.watchers.values()):
            call()


def ping_over(broker: Broker) -> Asker:
    """Return what pings an instance over this broker."""
    ping = wire.encode(Ping())

    async def ask(instance: str) -> None:
        await broker.request(subjects.ping(instance), ping, timeout_s=TIMEOUT_S)

    return ask


@asynccontextmanager
async def answering_pings(broker: Broker, instance: str) -> AsyncIterator[None]:
    """Answer this process's pings, each at once, until the end of the block. Raises: BrokerError."""
    pong = wire.encode(Pong(instance=instance))
    answers: set[asyncio.Task[None]] = set()

    async def answer(received: Received) -> None:
        try:
            wire.decode(received.payload, Ping)
            await broker.respond(received, pong)
        except (WireError, BrokerError) as error:
            logger.debug("ping not answered: %s", error, extra={"action": "ping_lost"})

    def on_ping(received: Received) -> None:
        spawn(answer(received), answers)

    subscription = await broker.subscribe(subjects.ping(instance), on_ping)
    try:
        yield
    finally:
        await subscription.unsubscribe()
