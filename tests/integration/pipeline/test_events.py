"""Events: what happens to a request, told once by ID, and with its end stored before its reader hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from headrace.shared import subjects
from headrace.shared.broker import Received
from headrace.shared.errors import BrokerError
from headrace.shared.events import Event, Events
from headrace.shared.messages import Cancel
from headrace.shared.subjects import Lane, Role
from headrace.shared.wire import encode

from .conftest import STAGES, Engines, Pipeline
from .test_lanes import Caller, body, text_of

WATCHDOG_S = 60


class Listener:
    """Hears every event of a tenant as it is published, and knows what the stream keeps."""

    def __init__(self, pipeline: Pipeline, tenant: str) -> None:
        self._broker = pipeline.broker
        self._pattern = f"{subjects.ROOT}.ev.{tenant}.*.*"
        self._heard: list[Event] = []
        self._news = asyncio.Event()

    async def start(self) -> Listener:
        await self._broker.subscribe(self._pattern, self._on_event)
        return self

    def _on_event(self, received: Received) -> None:
        self._heard.append(msgspec.json.decode(received.payload, type=Event))
        self._news.set()

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(WATCHDOG_S):
            while not set(names) <= {event.name for event in self._heard}:
                self._news.clear()
                await self._news.wait()

    async def kept(self) -> list[Event]:
        stored = await self._broker.stored_on(self._pattern)
        return [msgspec.json.decode(message.payload, type=Event) for message in stored]


def names(events: list[Event]) -> list[str]:
    return sorted(event.name for event in events)


def with_lanes(pipeline: Pipeline, *lanes: Lane) -> None:
    events = msgspec.structs.replace(pipeline.settings.events, lanes=lanes)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, events=events)


async def test_a_request_is_accepted_started_and_completed_as_cloudevents_say_it(
    pipeline: Pipeline, engines: Engines, slug: str
) -> None:
    await pipeline.start(*STAGES)
    listener = await Listener(pipeline, slug).start()
    caller = Caller(pipeline, slug)
    async with asyncio.timeout(WATCHDOG_S):
        text_of(await (await caller.submit(Lane.STD, "tell me")))
    await listener.until("request.accepted", "request.started", "request.completed")
    kept = await listener.kept()
    assert names(kept) == ["request.accepted", "request.completed", "request.started"]
    end = next(event for event in kept if event.name == "request.completed")
    assert end.id == f"{slug}.{end.subject}.completed"
    assert (end.source, end.specversion) == (f"/headrace/tenants/{slug}", "1.0")
    assert end.data["lane"] == "std"
    assert end.data["status"] == "ok"
    assert end.data["num_output_token_ids"] == 16
    (message,) = await pipeline.broker.stored_on(subjects.event(slug, "request", "completed"))
    assert message.headers["content-type"] == "application/cloudevents+json"
    assert b"tell me" not in message.payload


async def test_the_end_of_a_request_is_told_however_it_ends(
    pipeline: Pipeline, held: Engines, slug: str
) -> None:
    await pipeline.start(*STAGES)
    listener = await Listener(pipeline, slug).start()
    caller = Caller(pipeline, slug)
    failed = await caller.submit(Lane.STD, "x", max_tokens=0)
    expired = await caller.submit(Lane.BULK, "x", headers={"Hr-Deadline": "1"})
    await caller.submit(Lane.STD, "x", headers={"Hr-Request-Id": f"{slug}-cancelled"})
    await held.decode[0].wait_until(lambda _: held.decode[0].num_held == 1)
    cancel = Cancel(request_id=f"{slug}-cancelled", tenant=slug, reason="a test")
    await pipeline.broker.publish(subjects.cancel(slug, cancel.request_id), encode(cancel))
    async with asyncio.timeout(WATCHDOG_S):
        assert [(await end).status for end in (failed, expired)] == ["error", "expired"]
    await listener.until("request.failed", "request.expired", "request.cancelled")
    ends = [event for event in await listener.kept() if "status" in event.data]
    assert names(ends) == ["request.cancelled", "request.expired", "request.failed"]


async def test_an_end_that_was_not_told_is_told_before_the_request_is_settled(
    pipeline: Pipeline, engines: Engines, slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.start(*STAGES)
    tell, tries = Events.request_ended, []

    async def fail_at_first(self: Events, *arguments: Any) -> None:
        tries.append(arguments)
        if len(tries) == 1:
            raise BrokerError("away")
        await tell(self, *arguments)

    monkeypatch.setattr(Events, "request_ended", fail_at_first)
    async with asyncio.timeout(WATCHDOG_S):
        text_of(await (await Caller(pipeline, slug).submit(Lane.STD, "hello")))
    # Whoever has read the answer finds its event in the stream.
    kept = await (await Listener(pipeline, slug).start()).kept()
    assert names([event for event in kept if "status" in event.data]) == ["request.completed"]


async def test_a_submission_that_comes_again_after_its_end_tells_nothing_new(
    pipeline: Pipeline, engines: Engines, slug: str
) -> None:
    await pipeline.start(*STAGES)
    headers = {"Hr-Request-Id": f"{slug}-same"}
    listener = await Listener(pipeline, slug).start()
    again = asyncio.Event()
    out = subjects.out(slug, f"{slug}-same")
    await pipeline.broker.subscribe(out, lambda _: again.set())
    for number in range(2):
        again.clear()
        await pipeline.broker.publish_durable(
            subjects.req(slug, pipeline.settings.model.served_name, Lane.STD),
            msgspec.json.encode(body(pipeline, "hello")),
            message_id=f"{slug}-{number}",  # or the broker would take the second for the first
            headers={"Hr-Endpoint": "completions"} | headers,
        )
        async with asyncio.timeout(WATCHDOG_S):
            await again.wait()
    await listener.until("request.completed")
    kept = [event for event in await listener.kept() if "status" in event.data]
    assert names(kept) == ["request.completed"]


async def test_what_a_person_waits_for_is_not_told_unless_the_settings_say_so(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines, slug: str
) -> None:
    tenant = pipeline.settings.gateway.tenant
    for lanes, told in (((Lane.STD,), []), ((Lane.RT,), ["request.completed"])):
        with_lanes(pipeline, *lanes)
        services = await pipeline.start(Role.GATEWAY, *STAGES)
        listener = await Listener(pipeline, tenant).start()
        answer = await client.post("/v1/completions", json=body(pipeline, "hello"))
        request_id = answer.headers["x-request-id"]
        for service in services:
            await service.drain()  # what it had to tell is with the broker now
        await listener.until(*told)
        kept = [event for event in await listener.kept() if event.subject == request_id]
        assert names(kept) == told
