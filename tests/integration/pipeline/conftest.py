"""The whole pipeline on a real broker with fake engines: every service a task of one event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from headrace.batch import service as batch
from headrace.decode import engine as decode_engines
from headrace.decode import service as decode
from headrace.derender import service as derender
from headrace.engine.fake_engine import FakeDecodeEngine, FakePrefillEngine
from headrace.gateway import service as gateway
from headrace.prefill import engine as prefill_engines
from headrace.prefill import service as prefill
from headrace.render import service as render
from headrace.shared import settings as settings_module
from headrace.shared.broker import Broker, Delivery, WorkQueue
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.workers import WorkerTable

from ...ports import free_port

RUN: dict[Role, Callable[..., Awaitable[None]]] = {
    Role.RENDER: render.run,
    Role.PREFILL: prefill.run,
    Role.DECODE: decode.run,
    Role.DERENDER: derender.run,
    Role.GATEWAY: gateway.run,
    Role.BATCH: batch.run,
}
STAGES = (Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER)


@dataclass
class Service:
    """One running service."""

    role: Role
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def drain(self) -> None:
        """Stop it as SIGTERM does, and wait."""
        self.stop.set()
        await self.task

    async def kill(self) -> None:
        """End it without a word, as far as a task can."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Pipeline:
    """Services that a test starts and stops, and a client."""

    settings: Settings
    broker: Broker
    table: WorkerTable
    services: list[Service] = field(default_factory=list)

    async def start(self, *roles: Role, settings: Settings | None = None) -> list[Service]:
        """Start services and wait until each is ready."""
        before = {heartbeat.instance for heartbeat in self.table.workers()}
        started = []
        for role in roles:
            stop = asyncio.Event()
            task = asyncio.create_task(
                RUN[role](settings or self.settings, engine="fake", stop=stop)  # type: ignore[arg-type]
            )
            started.append(Service(role, stop, task))
        self.services += started

        def all_ready(table: WorkerTable) -> bool:
            new = [h for h in table.workers() if h.instance not in before and h.state == "ready"]
            return sorted(h.role for h in new) == sorted(roles)

        ready = asyncio.create_task(self.table.wait_for(all_ready))
        done, _ = await asyncio.wait(
            {ready, *(service.task for service in started)}, return_when=asyncio.FIRST_COMPLETED
        )
        if ready not in done:
            ready.cancel()
            for task in done:
                task.result()
            raise AssertionError("a service ended before it was ready")
        return started

    def heartbeat(self, role: Role) -> Any:
        """Return the heartbeat of the only worker of a role."""
        (heartbeat,) = self.table.ready(role)
        return heartbeat


class Engines:
    """The fake engines that the services of this test have built, in the order of their start."""

    def __init__(self) -> None:
        self.prefill: list[FakePrefillEngine] = []
        self.decode: list[FakeDecodeEngine] = []
        self.hold_decode = False
        self.poison_decode = False


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    built = Engines()

    def build_prefill(settings: Settings, engine: EngineKind) -> FakePrefillEngine:
        built.prefill.append(FakePrefillEngine(settings))
        return built.prefill[-1]

    def build_decode(settings: Settings, engine: EngineKind) -> FakeDecodeEngine:
        built.decode.append(FakeDecodeEngine(settings))
        built.decode[-1].faults.hold = built.hold_decode
        built.decode[-1].faults.die_next = built.poison_decode
        return built.decode[-1]

    monkeypatch.setattr(prefill_engines, "build", build_prefill)
    monkeypatch.setattr(decode_engines, "build", build_decode)
    return built


@pytest.fixture
def held(engines: Engines) -> Iterator[Engines]:
    """Decode holds what it is given until it is released."""
    engines.hold_decode = True
    yield engines
    for engine in engines.decode:
        engine.release()


@pytest.fixture
def settings(nats_server: NatsServer, slug: str) -> Settings:
    return settings_module.load(
        env={},
        overrides={
            "model": {"served_name": slug},
            "broker": {"url": nats_server.url},
            "gateway": {"port": free_port()},
            "decode": {"local_prefill_threshold": 0},
            "fake": {"step_s": 0.0, "prefill_s_per_1k": 0.0},
        },
    )


@asynccontextmanager
async def piped(settings: Settings) -> AsyncIterator[Pipeline]:
    """A pipeline whose services are ended with the block."""
    broker = await Broker.connect(settings.broker, role="test", name="pipeline")
    table = WorkerTable(broker)
    await table.start()
    pipeline = Pipeline(settings, broker, table)
    yield pipeline
    for service in reversed(pipeline.services):
        await service.kill()
    await table.stop()
    await broker.close()


@pytest.fixture
async def pipeline(settings: Settings) -> AsyncIterator[Pipeline]:
    async with piped(settings) as pipeline:
        yield pipeline


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{settings.gateway.port}"
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client


def shorten_ack_wait(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the broker give a job whose worker is silent to another one so soon."""
    job = WorkQueue.job.__func__  # type: ignore[attr-defined]

    def short(cls: type[WorkQueue], pool: str, lane: Lane) -> WorkQueue:
        return dataclasses.replace(job(cls, pool, lane), ack_wait_s=seconds)

    monkeypatch.setattr(WorkQueue, "job", classmethod(short))


def keep_silent(monkeypatch: pytest.MonkeyPatch, num_deliveries: float = math.inf) -> None:
    """Have workers give no sign of life in so many deliveries of a message."""
    keep_alive = Delivery._keep_alive

    async def silent(self: Delivery) -> None:
        if self.num_delivered > num_deliveries:
            await keep_alive(self)
        await asyncio.Event().wait()

    monkeypatch.setattr(Delivery, "_keep_alive", silent)
