"""Servers that a test may break."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from headrace.shared.nats_server import NatsServer


@pytest_asyncio.fixture
async def nats_server_of_its_own(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server of one test's own, with a store that outlives a kill."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    yield server
    server.kill()
