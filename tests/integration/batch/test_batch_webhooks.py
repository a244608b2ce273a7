"""What a batch that ran tells: events of it and of each line, and webhooks to who asked for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

import msgspec

from headrace.shared import subjects
from headrace.shared.events import Event
from headrace.shared.records import new_id
from headrace.shared.subjects import Role
from headrace.shared.webhooks.endpoints import Endpoint, new_secret

from ..webhooks.conftest import Receiver, receiver
from .conftest import STAGES, TENANT, WITHIN_S, Batches, Engines, Pipeline

__all__ = ["receiver"]
NUM_LINES = 20


async def endpoint(batches: Batches, url: str) -> None:
    now = int(time.time())
    made = Endpoint(
        id=new_id("we_"),
        name="ours",
        url=url,
        event_types=("batch.in_progress", "batch.completed"),
        secret=new_secret(),
        created_at=now,
        updated_at=now,
    )
    await batches.records.put("hook", TENANT, made.id, made, expect=0)


async def test_a_batch_tells_its_beginning_and_end_and_each_line_its_own_once(
    pipeline: Pipeline, batches: Batches, engines: Engines, receiver: Receiver
) -> None:
    webhooks = msgspec.structs.replace(pipeline.settings.webhooks, allow_private=True)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, webhooks=webhooks)
    await endpoint(batches, receiver.url)
    await pipeline.start(*STAGES, Role.BATCH)
    batch_id = await batches.create(batches.lines(NUM_LINES))
    assert (await batches.until(batch_id)).status == "completed"
    async with asyncio.timeout(WITHIN_S):
        await receiver.got(2)
    bodies = [json.loads(request.body) for request in receiver.requests]
    assert {(b["type"], b["data"]["id"]) for b in bodies} == {
        ("batch.in_progress", batch_id),
        ("batch.completed", batch_id),
    }
    end = next(b for b in bodies if b["type"] == "batch.completed")
    assert end["data"]["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES}
    stored = await pipeline.broker.stored_on(f"{subjects.ROOT}.ev.{TENANT}.*.*")
    events = [msgspec.json.decode(message.payload, type=Event) for message in stored]
    mine = Counter(event.name for event in events if event.subject.startswith(batch_id))
    assert mine["request.completed"] == NUM_LINES
    assert mine["batch.in_progress"] == mine["batch.completed"] == 1
