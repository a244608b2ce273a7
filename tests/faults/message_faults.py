"""Faults of messages that need no process in hand: repeated later, unreadable, or read by nobody."""

from __future__ import annotations

import asyncio
import contextlib
import random

from headrace.shared import subjects
from headrace.shared.broker import Broker, Received
from headrace.shared.errors import BrokerError
from headrace.shared.subjects import ROOT, Lane, Role
from headrace.shared.workers import WorkerTable

from .stack import MODEL

LISTEN_S = 0.3
MAX_REPLAYED = 60
REPLAYED = ("frames.*", "kv.*", "ctl.worker.*", "out.*.*")


async def replay(broker: Broker, rng: random.Random, wait_s: float) -> int:
    """Publish again, later, what was captured a moment ago; return how many messages."""
    captured: list[Received] = []
    with contextlib.suppress(BrokerError):
        for subject in REPLAYED:
            subscription = await broker.subscribe(f"{ROOT}.{subject}", captured.append)
            await asyncio.sleep(LISTEN_S)
            await subscription.unsubscribe()
        await asyncio.sleep(wait_s)
        captured = rng.sample(captured, min(len(captured), MAX_REPLAYED))
        for message in captured:
            headers = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
            await broker.publish(message.subject, message.payload, headers or None)
    return len(captured)


async def poison(broker: Broker, table: WorkerTable, rng: random.Random, name: str) -> int:
    """Publish what no stage can read, with a tenant that says so; return how many messages."""
    slug = subjects.model_slug(MODEL)
    lane = rng.choice([Lane.STD, Lane.BULK])
    wanted = [subjects.req("poison", slug, lane)]
    if beats := table.ready(Role.DECODE):
        wanted.append(subjects.job(subjects.pool(slug, beats[0].contract), "poison", lane))
    num = 0
    for index, subject in enumerate(wanted):
        with contextlib.suppress(BrokerError):
            await broker.publish_durable(subject, b"{", message_id=f"poison.{name}.{index}")
            num += 1
    return num


async def read_slowly(port: int, seconds: float) -> None:
    """Subscribe to everything over a bare socket, and read nothing."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    except OSError:
        return  # the broker is away just now
    writer.write(b'CONNECT {"verbose":false}\r\nSUB hr.v1.> 1\r\nPING\r\n')
    await asyncio.sleep(seconds)
    writer.transport.abort()
