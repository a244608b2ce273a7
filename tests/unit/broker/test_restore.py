"""When the broker counts as back, and what is declared while it is not quite."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.shared.broker import Broker, WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings


class Connection:
    is_connected = True


async def test_a_connection_that_breaks_while_streams_are_declared_is_waited_for(
    monkeypatch: Any,
) -> None:
    broker = Broker(BrokerSettings(), role="test", name="restore")
    data = Connection()
    monkeypatch.setattr(broker, "_data", data)
    monkeypatch.setattr(broker, "_control", Connection())
    calls: list[str] = []

    async def declare() -> None:
        if not calls:
            data.is_connected = False
            broker._on_lost()
        calls.append("declared")

    async def back() -> None:
        calls.append("back")

    monkeypatch.setattr(broker, "_declare_until_done", declare)
    broker.on_reconnect(back)
    async with asyncio.timeout(10):
        broker._on_back()
        assert broker._restoring is not None
        await broker._restoring
        assert (broker.is_connected, calls) == (False, ["declared"])
        data.is_connected = True
        broker._on_back()
        await broker._restoring
    assert (broker.is_connected, calls) == (True, ["declared", "declared", "back"])


async def test_a_queue_is_declared_again_while_a_cluster_elects_a_leader(monkeypatch: Any) -> None:
    broker = Broker(BrokerSettings(publish_timeout_s=60.0), role="test", name="declare")
    broker._ready.set()
    tries: list[WorkQueue] = []

    async def declare(connection: Any, queue: WorkQueue) -> None:
        tries.append(queue)
        if len(tries) == 1:
            raise BrokerError("no leader yet")

    monkeypatch.setattr(broker._topology, "declare_consumer", declare)
    own = WorkQueue.prefill_worker("m", "prefill-1")
    async with asyncio.timeout(30):
        await broker.declare_queue(own)
    assert tries == [own, own]


async def test_a_queue_that_can_not_be_declared_in_time_is_an_error(monkeypatch: Any) -> None:
    broker = Broker(BrokerSettings(publish_timeout_s=0.1), role="test", name="declare")
    broker._ready.set()

    async def declare(connection: Any, queue: WorkQueue) -> None:
        raise BrokerError("no leader")

    monkeypatch.setattr(broker._topology, "declare_consumer", declare)
    async with asyncio.timeout(30):
        with pytest.raises(BrokerError, match="no leader"):
            await broker.declare_queue(WorkQueue.prefill_worker("m", "prefill-1"))
