"""Workers tell how long their work waits: one of each kind."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack

from headrace.shared import subjects
from headrace.shared.broker import Broker, DeniedError, WorkQueue
from headrace.shared.messages import Heartbeat
from headrace.shared.queue_ages import QueueAges
from headrace.shared.subjects import Lane, Role
from headrace.shared.workers import Beacon, WorkerTable

TICK_S = 0.02
WATCHDOG_S = 60


class Kind:
    """Workers of one model: each has a table, looks, and beats."""

    def __init__(self, broker: Broker, stack: AsyncExitStack) -> None:
        self.slug = f"m{uuid.uuid4().hex[:8]}"
        self._broker = broker
        self._stack = stack

    async def submit(self, lane: Lane, payload: bytes = b"{}") -> None:
        subject = subjects.req("acme", self.slug, lane)
        await self._broker.publish_durable(subject, payload, message_id=uuid.uuid4().hex)

    async def join(self, instance: str) -> QueueAges:
        table = await self._stack.enter_async_context(WorkerTable(self._broker))
        ages = QueueAges(self._broker, table, instance, Role.RENDER, slug=self.slug, contract="c")

        def beat() -> Heartbeat:
            return Heartbeat(
                role=Role.RENDER,
                instance=instance,
                model=self.slug,
                contract="c",
                state="ready",
                slots=1,
                num_running=0,
                oldest_wait_s=ages.waits_s,
            )

        beacon = Beacon(self._broker, beat, TICK_S)
        await self._stack.enter_async_context(beacon)
        task = asyncio.create_task(ages.run(TICK_S))
        self._stack.callback(task.cancel)
        return ages

    async def until(self, told: dict[str, set[str]]) -> None:
        """Wait until the workers tell the ages of these lanes, each of its own."""
        async with WorkerTable(self._broker) as table:
            await table.wait_for(
                lambda t: (
                    told
                    == {
                        b.instance: set(b.oldest_wait_s)
                        for b in t.workers()
                        if b.model == self.slug
                    }
                )
            )


async def test_the_first_of_a_kind_tells_the_age_of_each_lane_in_which_something_waits(
    broker: Broker,
) -> None:
    async with asyncio.timeout(WATCHDOG_S), AsyncExitStack() as stack:
        kind = Kind(broker, stack)
        await broker.declare_model(kind.slug)
        await kind.submit(Lane.STD)
        await kind.submit(Lane.BULK, bytes(5_000_000))  # more than one glance reads
        await kind.join("render-2")
        await kind.until({"render-2": {"std", "bulk"}})
        await kind.join("render-1")
        await kind.until({"render-1": {"std", "bulk"}, "render-2": set()})
        delivery = await broker.take(WorkQueue.req(kind.slug, Lane.STD), wait_s=5)
        assert delivery is not None
        await kind.until({"render-1": {"bulk"}, "render-2": set()})
        await delivery.ack()


async def test_a_worker_that_may_not_look_tells_nothing_and_asks_no_more(broker: Broker) -> None:
    async with asyncio.timeout(WATCHDOG_S), AsyncExitStack() as stack:
        kind = Kind(broker, stack)
        ages = await kind.join("render-1")
        denied = Denying()
        ages._admin = denied  # type: ignore[assignment]  # a broker with users of an older file
        await denied.asked.wait()
        await ages.run(TICK_S)
        assert ages.waits_s == {}


class Denying:
    """An admin's part for a user without rights."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def queue(self, stream: str, consumer: str) -> None:
        self.asked.set()
        raise DeniedError(f"may not look at {consumer} of {stream}")
