"""Messages come in order however they are carried, and a handler's fault ends nothing."""

from __future__ import annotations

import asyncio

from headrace.shared.broker import Broker, Received

WATCHDOG_S = 60.0


async def test_what_follows_a_payload_in_parts_waits_for_it(broker: Broker, slug: str) -> None:
    subject = f"hr.v1.frames.{slug}"
    sizes: asyncio.Queue[int] = asyncio.Queue()
    await broker.subscribe(subject, lambda received: sizes.put_nowait(len(received.payload)))
    large = 5 * 2**20
    async with asyncio.timeout(WATCHDOG_S):
        for size in (1, large, 2, large, 3):
            await broker.publish(subject, bytes(size))
        assert [await sizes.get() for _ in range(5)] == [1, large, 2, large, 3]
        await broker.publish(subject, bytes(4))
        assert await sizes.get() == 4


async def test_a_handler_that_fails_gets_the_next_message_all_the_same(
    broker: Broker, slug: str
) -> None:
    subject = f"hr.v1.frames.{slug}"
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def handle(received: Received) -> None:
        if received.payload == b"bad":
            raise ValueError("injected")
        heard.put_nowait(received.payload)

    await broker.subscribe(subject, handle)
    async with asyncio.timeout(WATCHDOG_S):
        await broker.publish(subject, b"bad")
        await broker.publish(subject, b"good")
        assert await heard.get() == b"good"


async def test_what_is_published_after_a_subscription_without_a_round_trip_is_heard(
    broker: Broker, slug: str
) -> None:
    async with asyncio.timeout(WATCHDOG_S):
        for number in range(100):
            subject = f"hr.v1.frames.{slug}.{number}"
            heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            await broker.subscribe(
                subject,
                lambda received, heard=heard: heard.set_result(received.payload),
                is_confirmed=False,
            )
            await broker.publish(subject, b"x")
            assert await heard == b"x"


async def test_a_subscription_that_was_dropped_hears_nothing_more(
    broker: Broker, slug: str
) -> None:
    subject = f"hr.v1.frames.{slug}"
    heard: list[bytes] = []
    after: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    dropped = await broker.subscribe(subject, lambda received: heard.append(received.payload))
    await broker.subscribe(subject, lambda received: after.set_result(None))
    async with asyncio.timeout(WATCHDOG_S):
        await dropped.drop()
        await dropped.drop()
        await broker.publish(subject, b"x")
        await after
    assert heard == []
