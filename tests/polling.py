"""Waiting for what nobody tells, as the state of another process. Where there is an event, wait for that."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.02
LOST_S = 120.0  # only when all is lost


async def eventually(
    what: str,
    is_so: Callable[[], bool | Awaitable[bool]],
    *,
    within_s: float = LOST_S,
    poll_s: float = POLL_S,
) -> None:
    """Return once `is_so` says so. Raises: TimeoutError naming `what`."""
    try:
        async with asyncio.timeout(within_s) as limit:
            while True:
                found = is_so()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return
                await asyncio.sleep(poll_s)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise _late(what, within_s) from error


def wait_until(
    what: str, is_so: Callable[[], bool], *, within_s: float = LOST_S, poll_s: float = POLL_S
) -> None:
    """Return once `is_so` says so, where no event loop runs. Raises: TimeoutError naming `what`."""
    until = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > until:
            raise _late(what, within_s)
        time.sleep(poll_s)


def _late(what: str, within_s: float) -> TimeoutError:
    return TimeoutError(f"{what}: not after {within_s:g} s")
