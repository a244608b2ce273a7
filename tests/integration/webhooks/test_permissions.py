"""The deployment's `nats-server.conf`: who may tell events, and who may send webhooks."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.shared.broker import Broker, DeniedError
from headrace.shared.events import Events
from headrace.shared.messages import Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings, Settings
from headrace.shared.subjects import Lane, Role

from ...conftest import Serve
from ..broker import deployed
from .conftest import Receiver, Stage

TELLERS = (Role.RENDER, Role.DECODE, Role.DERENDER, Role.BATCH)


@pytest.fixture
async def server(serve: Serve, tmp_path: Path) -> NatsServer:
    return await serve(deployed.server(tmp_path, deployed.CONFIG.read_text()))


async def connected(stack: AsyncExitStack, server: NatsServer, user: str) -> Broker:
    settings = BrokerSettings(url=server.url, password=f"pw-{user}")
    broker = await Broker.connect(settings, role=user, name="1")
    stack.push_async_callback(broker.close)
    return broker


async def test_each_stage_tells_events_and_a_batch_worker_sends_them(
    server: NatsServer, slug: str, receiver: Receiver
) -> None:
    async with AsyncExitStack() as stack:
        admin = await connected(stack, server, "admin")
        mine = Stage(Settings(), admin, slug)
        batch = dataclasses.replace(mine, broker=await connected(stack, server, Role.BATCH))
        await batch.endpoint(receiver.url, "response.completed", "batch.completed")
        receiver.statuses = [500, 200]
        sending = batch.start()
        for role in TELLERS:
            events = Events(await connected(stack, server, role), tuple(Lane))
            ended = Terminal(request_id=f"resp_{role}", seq=0, status="ok", http_status=200)
            await events.request_ended(slug, Lane.STD, ended)
        await batch.tell("batch_1")
        await mine.noted("delivered", len(TELLERS) + 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_nobody_else_tells_events(server: NatsServer, slug: str) -> None:
    async with AsyncExitStack() as stack:
        for role in set(Role) - set(TELLERS):
            events = Events(await connected(stack, server, role), ())
            with pytest.raises(DeniedError):
                await events.batch(slug, "batch_1", "completed", {})
