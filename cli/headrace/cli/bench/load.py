"""When each request is sent: at random times of a given rate, or as soon as another one has ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def arrivals(num: int, rate: float, seed: int) -> list[float]:
    """Return when `num` requests are sent, in seconds from the first: a Poisson process.

    The same seed gives the same times; an infinite rate sends all at once.
    """
    if rate == float("inf"):
        return [0.0] * num
    random_times = random.Random(seed)
    times = [0.0]
    for _ in range(num - 1):
        times.append(times[-1] + random_times.expovariate(rate))
    return times[:num]


async def open_loop(
    items: Sequence[T], times: Sequence[float], send: Callable[[T], Awaitable[R]]
) -> list[R]:
    """Send each item at its time, whatever became of those before; return the results in order."""
    begin = time.perf_counter()

    async def one(item: T, at: float) -> R:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        return await send(item)

    return list(await asyncio.gather(*map(one, items, times)))


async def closed_loop(
    items: Sequence[T], concurrency: int, send: Callable[[T], Awaitable[R]]
) -> list[R]:
    """Keep `concurrency` items under way until all are done; return the results in order."""
    results: dict[int, R] = {}
    waiting = iter(enumerate(items))

    async def worker() -> None:
        for index, item in waiting:
            results[index] = await send(item)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return [results[index] for index in range(len(items))]
