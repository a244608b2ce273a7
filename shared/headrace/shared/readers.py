"""Who still waits for answers: a gateway that is gone reads none, and its requests need not be finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from headrace.shared.workers import WorkerTable

GONE_S = 30.0
CHECK_S = 1.0
READER_GONE = "its reader is gone"
MAX_REMEMBERED = 10_000


class Readers:
    """Watches the heartbeats of the processes that requests name as their readers.

    One is gone when it was not among the live workers for `gone_s` seconds. Time in which this process was
    cut off from the broker does not count: nobody was heard then.
    """

    def __init__(
        self,
        table: WorkerTable,
        is_connected: Callable[[], bool],
        *,
        gone_s: float = GONE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._is_connected = is_connected
        self._gone_s = gone_s
        self._now = now
        self._heard_since = now()
        self._last_seen: dict[str, float] = {}
        self._waiting: dict[object, tuple[str, Callable[[], Awaitable[None]]]] = {}

    def is_gone(self, reader: str | None) -> bool:
        """Whether nobody reads any more what this process waits for. None: nobody watches."""
        if reader is None or not self._is_connected():
            return False
        # One that was never seen may have started a moment ago: its time begins now.
        seen = max(self._last_seen.setdefault(reader, self._now()), self._heard_since)
        return self._now() - seen >= self._gone_s

    def watch(
        self, reader: str | None, on_gone: Callable[[], Awaitable[None]]
    ) -> Callable[[], None]:
        """Await `on_gone()` once the reader is gone, and again at each look until the watch ends.

        Returns what ends it.
        """
        key = object()
        if reader is not None:
            self._waiting[key] = (reader, on_gone)
            self._last_seen.setdefault(reader, self._now())

        def unwatch() -> None:
            self._waiting.pop(key, None)

        return unwatch

    async def run(self) -> None:
        """Look every second, until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_S)

    async def check(self) -> None:
        """Look once."""
        now = self._now()
        if not self._is_connected():
            self._heard_since = now
            return
        for beat in self._table.workers():
            self._last_seen.pop(beat.instance, None)  # to the end: the oldest goes first
            self._last_seen[beat.instance] = now
        while len(self._last_seen) > MAX_REMEMBERED:
            del self._last_seen[next(iter(self._last_seen))]
        for reader, on_gone in list(self._waiting.values()):
            if self.is_gone(reader):
                await on_gone()
