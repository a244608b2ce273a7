"""A broker, what sends webhooks, and a receiver that answers as a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from headrace.batch.webhooks import Webhooks
from headrace.shared import settings as settings_module
from headrace.shared import subjects
from headrace.shared.broker import Broker
from headrace.shared.events import Events
from headrace.shared.nats_server import NatsServer
from headrace.shared.records import Records, new_id
from headrace.shared.settings import Settings, WebhookSettings
from headrace.shared.subjects import Role
from headrace.shared.webhooks.endpoints import Endpoint, Sending, new_secret

WATCHDOG_S = 60
SOON_S = (0.01, 0.01, 0.01)


@dataclass
class Request:
    """What the receiver got."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A server that answers with these statuses in turn, and then with the last one for ever."""

    url: str
    statuses: list[int]
    headers: str = ""
    words: bytes = b""  # instead of an answer
    requests: list[Request] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def got(self, number: int) -> None:
        """Return when so many requests have come."""
        async with asyncio.timeout(WATCHDOG_S):
            while len(self.requests) < number:
                self.news.clear()
                await self.news.wait()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append(Request(head[0].split()[1], headers, body))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if self.words:
            writer.write(self.words)
        else:
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n{self.headers}\r\n".encode())
        await writer.drain()
        writer.close()
        self.news.set()


@dataclass
class Stage:
    """What the tests use."""

    settings: Settings
    broker: Broker
    tenant: str
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def records(self) -> Records:
        return Records(self.broker)

    async def tell(self, batch_id: str, status: str = "completed") -> None:
        """Tell that a batch of the tenant has a new status."""
        events = Events(self.broker, ())
        await events.batch(self.tenant, batch_id, status, {"completed": 3})

    async def endpoint(self, url: str, *event_types: str, **more: Any) -> Endpoint:
        """Record an endpoint of the tenant."""
        now = int(time.time())
        endpoint = Endpoint(
            id=new_id("we_"),
            name="ours",
            url=url,
            event_types=event_types or ("batch.completed",),
            secret=new_secret(),
            created_at=now,
            updated_at=now,
        )
        endpoint = msgspec.structs.replace(endpoint, **more)
        await self.records.put("hook", self.tenant, endpoint.id, endpoint, expect=0)
        return endpoint

    def start(self, *, delays_s: tuple[float, ...] = SOON_S, **settings: Any) -> asyncio.Task[None]:
        """Start what sends webhooks."""
        chosen = WebhookSettings(**{"allow_private": True, **settings})
        webhooks = Webhooks(self.broker, chosen, delays_s=delays_s)
        self.tasks.append(asyncio.create_task(webhooks.serve(asyncio.Event())))
        return self.tasks[-1]

    async def settled(self) -> None:
        """Return when nothing of the tenant waits to be sent."""
        async with asyncio.timeout(WATCHDOG_S):
            while await self.broker.stored_on(f"{subjects.ROOT}.hook.{self.tenant}.*"):
                continue

    async def sendings(self) -> list[Sending]:
        """Return what is noted of the tenant's webhooks."""
        page = await self.records.list("hooklog", self.tenant, Sending, limit=100)
        return [record.value for record in page.records]

    async def noted(self, state: str, num: int = 1) -> list[Sending]:
        """Return when so many webhooks are in a state."""
        changed = asyncio.Event()
        subscription = await self.records.watch("hooklog", lambda *_: changed.set())
        async with asyncio.timeout(WATCHDOG_S):
            while True:
                found = [sending for sending in await self.sendings() if sending.state == state]
                if len(found) >= num:
                    await subscription.unsubscribe()
                    return found
                await changed.wait()
                changed.clear()


@asynccontextmanager
async def staged(server: NatsServer, tenant: str) -> AsyncIterator[Stage]:
    settings = settings_module.load(env={}, overrides={"broker": {"url": server.url}})
    broker = await Broker.connect(settings.broker, role=Role.BATCH, name="webhooks")
    stage = Stage(settings, broker, tenant)
    yield stage
    for task in stage.tasks:
        task.cancel()
    await asyncio.gather(*stage.tasks, return_exceptions=True)
    await broker.close()


@pytest.fixture
async def stage(nats_server: NatsServer, slug: str) -> AsyncIterator[Stage]:
    async with staged(nats_server, slug) as stage:
        yield stage


@pytest.fixture
async def own_stage(own_server: NatsServer, slug: str) -> AsyncIterator[Stage]:
    async with staged(own_server, slug) as stage:
        yield stage


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver("", [200])
    server = await asyncio.start_server(lambda r, w: made.answer(r, w), "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield made
    server.close()
    await server.wait_closed()
