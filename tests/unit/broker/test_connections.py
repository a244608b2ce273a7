"""When the broker counts as back."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.shared.broker.connections import Connections
from headrace.shared.settings import BrokerSettings


class Connection:
    is_connected = True


async def test_a_connection_that_breaks_while_streams_are_declared_is_waited_for(
    monkeypatch: Any,
) -> None:
    calls: list[str] = []
    data = Connection()

    async def declare() -> None:
        if not calls:
            data.is_connected = False
            connections._on_lost()
        calls.append("declared")

    async def back() -> None:
        calls.append("back")

    connections = Connections(BrokerSettings(), role="test", name="restore", declare=declare)
    monkeypatch.setattr(connections, "data", data)
    monkeypatch.setattr(connections, "control", Connection())
    connections.callbacks.append(back)
    async with asyncio.timeout(10):
        connections._on_back()
        assert connections._restoring is not None
        await connections._restoring
        assert (connections.is_connected, calls) == (False, ["declared"])
        data.is_connected = True
        connections._on_back()
        await connections._restoring
    assert (connections.is_connected, calls) == (True, ["declared", "declared", "back"])
