"""A cluster of three brokers loses one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.shared import subjects
from headrace.shared.broker import Broker, WorkQueue
from headrace.shared.broker.jetstream import api
from headrace.shared.broker.streams import Stream, streams
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane

from .cluster import NUM_SERVERS, Cluster

NUM_BEFORE = 50
NUM_AFTER = 50
WATCHDOG_S = 120.0


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start()
    yield cluster
    cluster.kill()


@pytest_asyncio.fixture
async def broker(cluster: Cluster) -> AsyncIterator[Broker]:
    settings = BrokerSettings(url=cluster.url, replicas=NUM_SERVERS, publish_timeout_s=60.0)
    broker = await Broker.connect(settings, role="test", name="test")
    await broker.declare_model("m")
    yield broker
    await broker.close()


async def leader_of(broker: Broker, stream: str) -> str:
    info = await api(broker._control, f"STREAM.INFO.{stream}")
    leader: str = info["cluster"]["leader"]
    return leader


async def test_every_stream_and_consumer_is_kept_three_times(broker: Broker) -> None:
    def names(declared: tuple[Stream, ...]) -> list[str]:
        return [stream.name for stream in declared]

    for name in names(streams(1)):
        info = await api(broker._control, f"STREAM.INFO.{name}")
        assert info["config"]["num_replicas"] == NUM_SERVERS
    for queue in WorkQueue.of_model("m", "m"):
        info = await api(broker._control, f"CONSUMER.INFO.{queue.stream}.{queue.consumer}")
        assert len(info["cluster"]["replicas"]) == NUM_SERVERS - 1


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "file"])
async def test_a_killed_leader_loses_nothing_that_was_accepted(
    cluster: Cluster, broker: Broker, in_memory: bool
) -> None:
    queue = WorkQueue.prefill("m", Lane.RT) if in_memory else WorkQueue.job("m", Lane.RT)
    subject = subjects.prefill("m", Lane.RT) if in_memory else subjects.job("m", "acme", Lane.RT)
    taken: set[int] = set()
    everything = set(range(NUM_BEFORE + NUM_AFTER))

    async def work() -> None:
        while taken != everything:
            if (delivery := await broker.take(queue, wait_s=1.0)) is not None:
                await delivery.ack()
                taken.add(int(delivery.payload))

    async def publish(number: int) -> None:
        assert await broker.publish_durable(subject, b"%d" % number, message_id=f"j{number}")

    async with asyncio.timeout(WATCHDOG_S):
        for number in range(NUM_BEFORE):
            await publish(number)
        workers = [asyncio.create_task(work()) for _ in range(4)]
        leader = await leader_of(broker, queue.stream)
        cluster.server(leader).kill()
        for number in range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER):
            await publish(number)
        await asyncio.gather(*workers)
        assert await leader_of(broker, queue.stream) != leader
    assert taken == everything
