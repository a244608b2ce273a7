"""What is given back unharmed may come again as often as it likes; what fails is put aside in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.shared import subjects
from headrace.shared import worker as worker_module
from headrace.shared.broker import Broker, Delivery, WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import MAX_DELIVERIES, Worker, joined

MANY = 3 * MAX_DELIVERIES


@pytest_asyncio.fixture
async def worker(broker_settings: BrokerSettings, slug: str) -> AsyncIterator[Worker]:
    async with joined(
        Settings(broker=broker_settings),
        Role.DECODE,
        model=slug,
        contract="0" * 32,
        slots=1,
        stop=asyncio.Event(),
    ) as worker:
        yield worker


class Bench:
    """A message on a queue, and what became of it."""

    def __init__(self, worker: Worker, broker: Broker) -> None:
        self.worker = worker
        self.broker = broker
        self.queue = WorkQueue.job(worker.pool, Lane.BULK)
        self.num_worked = 0
        self.num_given_up = 0

    async def put(self) -> None:
        subject = subjects.job(self.worker.pool, "acme", Lane.BULK)
        await self.broker.publish_durable(subject, b"job", message_id=subject)

    async def take(self) -> Delivery:
        delivery = await self.worker.broker.take(self.queue, wait_s=30)
        assert delivery is not None
        return delivery

    async def settle(self) -> None:
        await self.worker.settle(await self.take(), self._work, self._give_up)

    async def _work(self, delivery: Delivery) -> None:
        self.num_worked += 1
        await delivery.ack()

    async def _give_up(self, delivery: Delivery) -> None:
        self.num_given_up += 1


@pytest.fixture
def bench(worker: Worker, broker: Broker) -> Bench:
    return Bench(worker, broker)


async def test_a_message_that_came_back_unharmed_many_times_is_worked_off(bench: Bench) -> None:
    await bench.put()
    for _ in range(MANY):
        await bench.worker.hand_back(await bench.take())
    await bench.settle()
    assert (bench.num_worked, bench.num_given_up) == (1, 0)


async def test_a_message_that_failed_too_often_is_put_aside_however_often_it_came_back_unharmed(
    bench: Bench,
) -> None:
    await bench.put()
    for _ in range(MANY):
        await bench.worker.hand_back(await bench.take())
    for _ in range(MAX_DELIVERIES):
        await (await bench.take()).nak()  # as when its worker is killed
    await bench.settle()
    assert (bench.num_worked, bench.num_given_up) == (0, 1)


async def test_a_worker_that_is_ended_gives_its_message_back_unharmed(bench: Bench) -> None:
    await bench.put()
    for _ in range(MAX_DELIVERIES):
        running = asyncio.Event()

        async def work(delivery: Delivery, running: asyncio.Event = running) -> None:
            running.set()
            await asyncio.Event().wait()

        job = asyncio.create_task(bench.worker.settle(await bench.take(), work, bench._give_up))
        await running.wait()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
    await bench.settle()
    assert (bench.num_worked, bench.num_given_up) == (1, 0)


async def test_a_message_is_none_the_worse_for_a_broker_that_was_lost_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "REDELIVERY_DELAY_S", 0.0)

    async def lose(delivery: Delivery) -> None:
        bench.worker.broker._connections.num_losses += 1
        raise BrokerError("the broker was away")

    await bench.put()
    for _ in range(MANY):
        await bench.worker.settle(await bench.take(), lose, bench._give_up)
    await bench.settle()
    assert (bench.num_worked, bench.num_given_up) == (1, 0)


async def test_a_message_that_is_there_at_every_loss_is_not_unharmed_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what breaks the connection."""
    monkeypatch.setattr(worker_module, "MAX_LOSSES", 2)
    handed_back: list[int] = []

    async def hand_back(self: Worker, delivery: Delivery, delay_s: float = 0.0) -> None:
        handed_back.append(delivery.num_delivered)
        await delivery.nak()

    async def lose(delivery: Delivery) -> None:
        bench.worker.broker._connections.num_losses += 1
        raise BrokerError("the broker was away")

    monkeypatch.setattr(Worker, "hand_back", hand_back)
    await bench.put()
    for _ in range(3):
        await bench.worker.settle(await bench.take(), lose, bench._give_up)
    assert handed_back == [1, 2]
