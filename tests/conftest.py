"""Fixtures that need a real broker, and what holds for every test."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import hypothesis
import pytest
import pytest_asyncio

from headrace.shared.broker import Broker
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings

# Its deadline is wall-clock time: on a machine with other work a right test would fail.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server on a free port, for the whole session: keep subjects and models apart."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
def broker_settings(nats_server: NatsServer) -> BrokerSettings:
    """Settings that reach the session's server."""
    return BrokerSettings(url=nats_server.url)


@pytest_asyncio.fixture
async def broker(broker_settings: BrokerSettings) -> AsyncIterator[Broker]:
    """A connected broker without a role: it may declare and use everything."""
    broker = await Broker.connect(broker_settings, role="test", name="test")
    yield broker
    await broker.close()


@pytest.fixture
def slug() -> str:
    """A model of this test's own."""
    return f"m-{uuid.uuid4().hex[:12]}"
