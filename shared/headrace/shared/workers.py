"""Who is there: workers say so every two seconds, and a table of them forgets who has fallen silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received, Subscription
from headrace.shared.errors import BrokerError, WireError
from headrace.shared.messages import Heartbeat, RollCall
from headrace.shared.subjects import Role, model_slug

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
MISSED_BEATS = 3
CLOCK_BEATS = 8
"""Heartbeats that a worker's clock is judged by: the quickest of them had the least to wait for on its way."""
MAX_CLOCKS = 10_000


def process_name(pid: int) -> str:
    """Return what `Heartbeat.process` calls a process of this machine."""
    return f"{socket.gethostname()}:{pid}"


class Beacon:
    """Publishes one worker's heartbeat: periodically, on a roll call, and when told to."""

    def __init__(
        self, broker: Broker, make: Callable[[], Heartbeat], interval_s: float = INTERVAL_S
    ) -> None:
        self._broker = broker
        self._make = make
        self._interval_s = interval_s
        self._called = asyncio.Event()
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        broker.on_reconnect(self._on_reconnect)

    async def start(self) -> None:
        """Beat once, and from then on. Raises: BrokerError."""
        self._subscription = await self._broker.subscribe(
            subjects.roll_call(), lambda _: self._called.set()
        )
        await self.beat()
        self._task = asyncio.create_task(self._run())

    async def beat(self) -> None:
        """Publish a heartbeat now. Raises: BrokerError."""
        heartbeat = msgspec.structs.replace(
            self._make(), process=process_name(os.getpid()), sent=time.time()
        )
        subject = subjects.heartbeat(
            model_slug(heartbeat.model), heartbeat.role, heartbeat.instance
        )
        await self._broker.publish(subject, wire.encode(heartbeat))

    async def stop(self) -> None:
        """Fall silent. The caller beats once more before, with state `stopped`, so that nobody has to wait."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._called.wait()
            self._called.clear()
            try:
                await self.beat()
            except BrokerError as error:
                logger.warning("no heartbeat: %s", error, extra={"action": "heartbeat_failed"})

    async def _on_reconnect(self) -> None:
        self._called.set()


class WorkerTable:
    """The live workers of all models, by their heartbeats.

    A worker leaves three intervals after its last beat, or at once with state `stopped`.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`now` is a monotonic clock, `clock` tells Unix seconds."""
        self._broker = broker
        self._interval_s = interval_s
        self._now = now
        self._clock = clock
        self._offsets: dict[str, deque[float]] = {}  # instance → received - sent, of its last beats
        self._beats: dict[str, tuple[Heartbeat, float]] = {}  # instance → beat, when it came
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        broker.on_reconnect(self._on_reconnect)

    async def start(self) -> None:
        """Listen, and ask everybody for a heartbeat. Raises: BrokerError."""
        self._subscription = await self._broker.subscribe(subjects.heartbeats(), self._on_heartbeat)
        await self._call_roll()

    async def stop(self) -> None:
        """Stop listening; the table stays as it is."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def workers(self) -> list[Heartbeat]:
        """Return the last heartbeat of every live worker, in whatever state."""
        oldest = self._now() - MISSED_BEATS * self._interval_s
        for instance in [i for i, (_, seen) in self._beats.items() if seen < oldest]:
            logger.info("worker fell silent", extra={"action": "worker_lost", "instance": instance})
            del self._beats[instance]
        return [beat for beat, _ in self._beats.values()]

    def forget(self, instance: str) -> None:
        """Take a worker out that is known to be gone; its next heartbeat would bring it back."""
        if self._beats.pop(instance, None) is not None:
            self._wake()

    def clock_offset(self, instance: str) -> float:
        """Return what to add to a time that this instance names to have it in the clock of this process (seconds).

        0 as long as nothing was heard of it. Also known for a while after it is gone.
        """
        return min(self._offsets.get(instance, (0.0,)))

    def ready(
        self, role: Role, *, slug: str | None = None, contract: str | None = None
    ) -> list[Heartbeat]:
        """Return the workers of a role that take work; None: of any model, of any contract."""
        return [
            beat
            for beat in self.workers()
            if beat.role == role
            and beat.state == "ready"
            and (slug is None or model_slug(beat.model) == slug)
            and (contract is None or beat.contract == contract)
        ]

    def models(self) -> dict[str, list[Heartbeat]]:
        """Return the live workers by served model name."""
        found: dict[str, list[Heartbeat]] = {}
        for beat in self.workers():
            found.setdefault(beat.model, []).append(beat)
        return found

    async def wait_for(self, predicate: Callable[[WorkerTable], bool]) -> None:
        """Return when `predicate` of this table holds; the caller sets the timeout."""
        while not predicate(self):
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                # A worker that falls silent changes the table without a message.
                async with asyncio.timeout(self._interval_s):
                    await changed.wait()

    def _on_heartbeat(self, received: Received) -> None:
        try:
            beat = wire.decode(received.payload, Heartbeat)
        except WireError as error:
            logger.warning("not a heartbeat: %s", error, extra={"action": "heartbeat_refused"})
            return
        if received.subject != subjects.heartbeat(model_slug(beat.model), beat.role, beat.instance):
            # The broker's permissions hold a role to its subject, not to its words.
            logger.warning(
                "a heartbeat of %s on a subject of another",
                beat.instance,
                extra={"action": "heartbeat_refused", "subject": received.subject},
            )
            return
        self._note_clock(beat)
        if beat.state == "stopped":
            self._beats.pop(beat.instance, None)
        else:
            self._beats[beat.instance] = (beat, self._now())
        self._wake()

    def _note_clock(self, beat: Heartbeat) -> None:
        if not beat.sent:
            return
        if beat.instance not in self._offsets and len(self._offsets) >= MAX_CLOCKS:
            del self._offsets[next(iter(self._offsets))]
        offsets = self._offsets.setdefault(beat.instance, deque(maxlen=CLOCK_BEATS))
        offsets.append(self._clock() - beat.sent)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _call_roll(self) -> None:
        await self._broker.publish(subjects.roll_call(), wire.encode(RollCall()))

    async def _on_reconnect(self) -> None:
        if self._subscription is not None:
            await self._call_roll()
