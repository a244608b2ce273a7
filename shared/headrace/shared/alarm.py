"""A time at which a waiting task is woken, put off without cost: for what waits for a message at every token ID."""

from __future__ import annotations

import asyncio


class Alarm:
    """Sets an event at a time of the event loop's clock.

    A timer that runs already is not moved to a later time: it goes off early, and whoever it wakes looks at the
    clock and sets the alarm again. So a wait that a message ends costs no timer, as `asyncio.timeout_at` would.
    """

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        """Wake at `when`, or earlier."""
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    def cancel(self) -> None:
        """Wake nobody."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._wake.set()
