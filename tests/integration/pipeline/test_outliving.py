"""Work that outlives its gateway and the broker's process: what was accepted is done once, and is there later."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headrace.shared.nats_server import NatsServer
from headrace.shared.subjects import Role

from .conftest import STAGES, Engines, Pipeline
from .test_flow import expected_text

WATCHDOG_S = 120.0


@pytest.fixture
def nats_server(own_server: NatsServer) -> NatsServer:
    """A server of this test's own, in place of the session's."""
    return own_server


async def until(client: httpx.AsyncClient, path: str, *statuses: str) -> Any:
    """Poll through an outage until the response has one of these statuses."""
    async with asyncio.timeout(WATCHDOG_S):
        while True:
            answer = await client.get(path)
            assert answer.status_code in (200, 503), answer.text
            if answer.status_code == 200 and answer.json()["status"] in statuses:
                return answer.json()


async def test_background_responses_outlive_a_crash_of_the_broker(
    pipeline: Pipeline, held: Engines, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    body = {"input": "hi", "max_output_tokens": 8, "background": True}
    running = (await client.post("/v1/responses", json=body)).json()["id"]
    await until(client, f"/v1/responses/{running}", "in_progress")
    nats_server.kill()
    await nats_server.restart()
    for engine in held.decode:
        engine.release()
    done = await until(client, f"/v1/responses/{running}", "completed", "incomplete", "failed")
    assert done["output"]
    again = (await client.post("/v1/responses", json=body)).json()["id"]
    other = await until(client, f"/v1/responses/{again}", "completed", "incomplete", "failed")
    assert other["output"][0]["content"] == done["output"][0]["content"]


async def test_a_call_with_a_key_is_answered_once_after_its_gateway_and_the_broker_crashed(
    pipeline: Pipeline, held: Engines, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    (gateway,) = await pipeline.start(Role.GATEWAY)
    await pipeline.start(*STAGES)
    body = {"model": pipeline.settings.model.served_name, "prompt": "once", "max_tokens": 8}
    headers = {"Idempotency-Key": "the one and only"}

    def ask() -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

    asking = ask()
    async with asyncio.timeout(WATCHDOG_S):
        while not held.decode[0].stats().num_running:
            await client.get("/health")
    await gateway.kill()
    await asyncio.gather(asking, return_exceptions=True)
    await pipeline.start(Role.GATEWAY)
    assert (await ask()).status_code == 409
    for engine in held.decode:
        engine.release()
    async with asyncio.timeout(WATCHDOG_S):
        while (answer := await ask()).status_code == 409:
            continue
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == expected_text("once", 8)
    nats_server.kill()
    await nats_server.restart()
    async with asyncio.timeout(WATCHDOG_S):
        while (again := await ask()).status_code == 503:
            continue
    assert (again.status_code, again.content) == (200, answer.content)
