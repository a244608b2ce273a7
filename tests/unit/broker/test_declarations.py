"""What is declared while the broker is not quite there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.shared.broker import WorkQueue
from headrace.shared.broker.declarations import Declarations
from headrace.shared.errors import BrokerError

OWN = WorkQueue.prefill_worker("m", "prefill-1")
LATER = WorkQueue.prefill_worker("m", "prefill-2")


class Connections:
    control = None

    async def wait_until_ready(self, timeout_s: float) -> None:
        """It is there."""


class Topology:
    """Fails to declare a queue so many times."""

    def __init__(self, num_failures: float = 0) -> None:
        self.num_failures = num_failures
        self.tries: list[WorkQueue] = []
        self.declarations: Declarations | None = None

    async def declare_streams(self, connection: Any) -> None:
        """There are none."""

    async def declare_consumer(self, connection: Any, queue: WorkQueue) -> None:
        self.tries.append(queue)
        if self.declarations is not None and queue is OWN:
            await self.declarations.queue(LATER)
        if len(self.tries) <= self.num_failures:
            raise BrokerError("no leader yet")


def declarations(topology: Any, timeout_s: float = 60.0) -> Declarations:
    connections: Any = Connections()
    return Declarations(connections, topology, timeout_s)


async def test_a_queue_is_declared_again_while_a_cluster_elects_a_leader() -> None:
    topology = Topology(num_failures=1)
    async with asyncio.timeout(30):
        await declarations(topology).queue(OWN)
    assert topology.tries == [OWN, OWN]


async def test_a_queue_that_can_not_be_declared_in_time_is_an_error() -> None:
    topology = Topology(num_failures=float("inf"))
    async with asyncio.timeout(30):
        with pytest.raises(BrokerError, match="no leader"):
            await declarations(topology, timeout_s=0.1).queue(OWN)


async def test_a_queue_may_be_declared_while_all_are_declared_again() -> None:
    topology = Topology()
    known = declarations(topology)
    async with asyncio.timeout(30):
        await known.queue(OWN)
        topology.declarations = known
        await known.until_done()
    assert topology.tries == [OWN, OWN, LATER]
    assert known.has(OWN)
    assert known.has(LATER)
