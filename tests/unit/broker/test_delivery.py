"""A delivery is kept from coming again: a third of its time after it was taken, and no sooner."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from nats.aio.msg import Msg

from headrace.shared.broker.delivery import IN_PROGRESS, Delivery

WATCHDOG_S = 20.0


class Settler:
    def __init__(self) -> None:
        self.signals: asyncio.Queue[bytes] = asyncio.Queue()

    async def settle(self, reply: str, payload: bytes) -> None:
        raise AssertionError("nothing is settled here")

    async def signal(self, reply: str, payload: bytes) -> None:
        self.signals.put_nowait(payload)


def delivery(settler: Settler, *, ack_wait_s: float, age_s: float) -> Delivery:
    stored = SimpleNamespace(timestamp=lambda: 0.0)
    metadata: Any = SimpleNamespace(
        num_delivered=1, stream="S", sequence=SimpleNamespace(stream=1), timestamp=stored
    )
    message = cast(Msg, SimpleNamespace(subject="s", reply="r", metadata=metadata))
    taken_at = asyncio.get_running_loop().time() - age_s
    return Delivery(message, b"", {}, settler=settler, ack_wait_s=ack_wait_s, taken_at=taken_at)


async def test_what_is_done_soon_says_nothing() -> None:
    settler = Settler()
    async with delivery(settler, ack_wait_s=3_600.0, age_s=0.0).keep_alive():
        for _ in range(5):
            await asyncio.sleep(0)
    assert settler.signals.empty()


async def test_what_took_long_to_come_says_at_once_that_it_is_here_still() -> None:
    settler = Settler()
    async with asyncio.timeout(WATCHDOG_S):
        async with delivery(settler, ack_wait_s=3_600.0, age_s=1_201.0).keep_alive():
            assert await settler.signals.get() == IN_PROGRESS


async def test_it_is_said_again_and_again() -> None:
    settler = Settler()
    async with asyncio.timeout(WATCHDOG_S):
        async with delivery(settler, ack_wait_s=0.003, age_s=0.0).keep_alive():
            for _ in range(3):
                assert await settler.signals.get() == IN_PROGRESS
