"""A request that waits for a worker, and the broker that is killed meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headrace.shared import subjects
from headrace.shared.broker import Broker
from headrace.shared.broker.connection import Connection
from headrace.shared.deadlines import KEPT_PAST_DEADLINE_S
from headrace.shared.nats_server import NatsServer
from headrace.shared.subjects import Role

from .conftest import STAGES, Pipeline
from .test_faults import completion
from .test_flow import expected_text

WATCHDOG_S = 60.0


@pytest.fixture
def nats_server(own_server: NatsServer) -> NatsServer:
    """A server of this test's own, in place of the session's."""
    return own_server


@pytest.mark.parametrize(
    ("missing", "waits_on"),
    [(Role.RENDER, "hr.v1.req."), (Role.DECODE, "hr.v1.job.")],
    ids=["for render", "for decode"],
)
async def test_what_nobody_had_taken_when_the_broker_was_killed_is_answered(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    missing: Role,
    waits_on: str,
) -> None:
    accepted = asyncio.Event()
    publish = Broker.publish_durable

    async def note(self: Broker, subject: str, payload: bytes, **more: Any) -> bool:
        is_stored = await publish(self, subject, payload, **more)
        if subject.startswith(waits_on):
            accepted.set()
        return is_stored

    monkeypatch.setattr(Broker, "publish_durable", note)
    await pipeline.start(Role.GATEWAY, *(role for role in STAGES if role is not missing))
    request = completion(pipeline, "nobody is there yet")
    asking = asyncio.create_task(client.post("/v1/completions", json=request))
    async with asyncio.timeout(WATCHDOG_S):
        await accepted.wait()
        nats_server.kill()
        await nats_server.restart()
        await pipeline.start(missing)
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text("nobody is there yet", 16)


async def test_the_parts_of_a_large_request_are_not_kept_long_past_its_deadline(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "max_payload", 2_000)
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = completion(pipeline, "in parts " * 200)
    answer = await client.post(
        "/v1/completions", json=request, headers={"X-Request-Timeout": "1000"}
    )
    assert answer.status_code == 200, answer.text
    parts = await pipeline.broker.stored_on(f"{subjects.ROOT}.blob.*")
    kept_s = [int(part.headers["Nats-TTL"].removesuffix("s")) for part in parts]
    assert max(kept_s) == 1_000 + KEPT_PAST_DEADLINE_S
