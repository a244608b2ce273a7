"""A send may wait until a point in time; what waits for something else is not its business."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.gateway.bounded_send import bounded

PART: dict[str, Any] = {"type": "http.response.body", "body": b"x", "more_body": True}
WATCHDOG_S = 20.0


class Client:
    """Takes what is sent at once, or not at all."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.num_sent += 1


def now() -> float:
    return asyncio.get_running_loop().time()


async def passed(when: float) -> None:
    """Return once the loop has worked off what was due by then."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_at(when + 0.001, over.set)
    await over.wait()


async def send_two(client: Client, when: float, between: Callable[[], Awaitable[None]]) -> None:
    async with bounded(client.send, when) as send:
        await send(PART)
        await between()
        await send(PART)


async def test_a_send_that_waits_past_the_end_is_given_up() -> None:
    client = Client()

    async def stop_reading() -> None:
        client.reads.clear()

    async with asyncio.timeout(WATCHDOG_S):  # outside, where it is another error
        with pytest.raises(TimeoutError):
            await send_two(client, now() + 0.01, stop_reading)
    assert client.num_sent == 1


async def test_after_the_end_nothing_waits_any_more() -> None:
    client, when = Client(), now() + 0.01

    async def stop_reading_late() -> None:
        await passed(when)
        client.reads.clear()

    async with asyncio.timeout(WATCHDOG_S):
        with pytest.raises(TimeoutError):
            await send_two(client, when, stop_reading_late)
    assert client.num_sent == 1


async def test_what_need_not_wait_is_sent_after_the_end_too() -> None:
    client, when = Client(), now() + 0.01
    async with asyncio.timeout(WATCHDOG_S):
        await send_two(client, when, lambda: passed(when))
    assert client.num_sent == 2
