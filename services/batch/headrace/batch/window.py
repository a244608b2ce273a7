"""How many lines of a batch are under way: as many as keep decode full, and no queue of them.

Grows while what has ended did not wait long, halves when it did or when a queue refuses more. A line that was
preempted by an urgent request, or had to wait for some, has waited: so the window also falls beside `rt` traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.shared.messages import Timings

FIRST = 8
FAST_WAIT_S = 0.25  # whoever waited less found a slot at once, however short its work was
LONG_WAIT_S = 1.0
SHORT_SHARE = 0.5  # of its own work: a wait up to here leaves room for more
LONG_SHARE = 2.0  # a wait above this is a queue


class Window:
    """Additive increase, multiplicative decrease; at most one decrease for what was under way at once."""

    def __init__(self, limit: Callable[[], int], first: int = FIRST) -> None:
        """`limit` says how many may be under way at most, which may change."""
        self._limit = limit
        self._size = float(first)
        self._is_doubling = True  # until the first decrease
        self._num_until_decrease = 0  # ends until the window may fall again
        self._changed = asyncio.Event()
        self.num_open = 0  #: lines under way

    @property
    def size(self) -> int:
        """How many may be under way now."""
        return max(1, min(int(self._size), self._limit()))

    async def enter(self) -> None:
        """Wait until one more may be under way, and count it."""
        while self.num_open >= self.size:
            self._changed.clear()
            await self._changed.wait()
        self.num_open += 1

    def leave(self) -> None:
        """One is not under way any more."""
        self.num_open -= 1
        self._changed.set()

    def ended(self, timings: Timings) -> None:
        """Learn from a line that has ended: how long it waited, and how long its work took."""
        self._num_until_decrease = max(0, self._num_until_decrease - 1)
        if timings.total_s is None:
            return  # refused before there was anything to wait for
        wait_s = (timings.render_queue_s or 0.0) + (timings.decode_queue_s or 0.0)
        work_s = max(0.0, timings.total_s - wait_s)
        if wait_s > max(LONG_WAIT_S, LONG_SHARE * work_s):
            self._decrease()
        elif wait_s <= max(FAST_WAIT_S, SHORT_SHARE * work_s) and self._is_used:
            more = 1.0 if self._is_doubling else 1.0 / self._size
            self._size = min(self._size + more, float(max(1, self._limit())))
            self._changed.set()

    def refused(self) -> None:
        """A queue takes no more."""
        self._decrease()

    @property
    def _is_used(self) -> bool:
        return self.num_open >= self.size - 1

    def _decrease(self) -> None:
        self._is_doubling = False
        if self._num_until_decrease == 0:
            self._num_until_decrease = self.num_open
            self._size = max(1.0, min(self._size, float(self._limit())) / 2)
