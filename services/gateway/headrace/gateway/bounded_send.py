"""A `send` that does not wait past a point in time, with one timer for the whole answer instead of one a part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Send


@asynccontextmanager
async def bounded(send: Send, when: float) -> AsyncIterator[Send]:
    """Give a `send` that raises TimeoutError out of the block when it waits past `when`, of the event loop's clock.

    What goes out without a wait is sent whenever it is: this process may have stood still past the end.
    """
    async with asyncio.timeout(None) as limit:
        within = _Bounded(send, when, limit)
        timer = asyncio.get_running_loop().call_at(when, within.end)
        try:
            yield within
        finally:
            timer.cancel()


class _Bounded:
    def __init__(self, send: Send, when: float, limit: asyncio.Timeout) -> None:
        self._send = send
        self._when = when
        self._limit = limit
        self._is_sending = False
        self._is_late = False

    def end(self) -> None:
        """The time is over: nothing may wait any more."""
        self._is_late = True
        if self._is_sending:
            self._limit.reschedule(self._when)

    async def __call__(self, message: Message) -> None:
        if self._is_late:
            async with asyncio.timeout_at(self._when):
                await self._send(message)
            return
        self._is_sending = True
        try:
            await self._send(message)
        finally:
            self._is_sending = False
