"""Fixtures that need a real broker, and what holds for every test."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio

from headrace.shared.broker import Broker
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings

from .real_stack import Stacks

Serve = Callable[[NatsServer], Awaitable[NatsServer]]

# Its deadline is wall-clock time: on a machine with other work a right test would fail.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server on a free port, for the whole session: keep subjects and models apart."""
    yield from _served(tmp_path_factory.mktemp("nats"))


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of one module's own, for tests that would see what others left in the session's."""
    yield from _served(tmp_path_factory.mktemp("nats"))


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start servers of one test's own, `await serve(NatsServer(...))`: they are killed when it is over."""
    started: list[NatsServer] = []

    async def start(server: NatsServer) -> NatsServer:
        started.append(server)
        await server.start()
        return server

    yield start
    for server in started:
        server.kill()


@pytest_asyncio.fixture
async def own_server(serve: Serve, tmp_path: Path) -> NatsServer:
    """A server that the test may break, with a store that outlives a kill."""
    return await serve(NatsServer(tmp_path / "nats"))


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


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    """Real stacks on the demo model, one at a time."""
    stacks = Stacks(tmp_path_factory.mktemp("home"))
    yield stacks
    stacks.close()


@pytest.fixture
def slug() -> str:
    """A model of this test's own."""
    return f"m-{uuid.uuid4().hex[:12]}"


def _served(folder: Path) -> Iterator[NatsServer]:
    server = NatsServer(folder)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())
