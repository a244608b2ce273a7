"""The broker under the whole pipeline dies, comes back, comes late."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import msgspec
import pytest

from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from .conftest import RUN, STAGES, Pipeline
from .test_flow import expected_text

NUM_RESTARTS = 20
NUM_CLIENTS = 6
MAX_TOKENS = 60
WATCHDOG_S = 120.0
REQUEST_TIMEOUT_S = 5.0


@pytest.fixture
def nats_server(own_server: NatsServer) -> NatsServer:
    """A server of this test's own, in place of the session's."""
    return own_server


async def ask(client: httpx.AsyncClient, model: str, prompt: str) -> httpx.Response:
    return await client.post(
        "/v1/completions",
        json={"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS},
        headers={"X-Request-Timeout": f"{REQUEST_TIMEOUT_S:g}"},
    )


async def test_a_storm_of_broker_crashes_gives_right_answers_or_errors_and_then_passes(
    pipeline: Pipeline, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    fake = msgspec.structs.replace(pipeline.settings.fake, step_s=0.002)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, fake=fake)
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = pipeline.settings.model.served_name
    numbers = itertools.count()
    over = asyncio.Event()

    async def load() -> None:
        while not over.is_set():
            prompt = f"question {next(numbers)}"
            answer = await ask(client, model, prompt)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == expected_text(prompt, MAX_TOKENS)
            else:  # refused while there is no broker, or not ended within its short deadline
                assert answer.status_code in (503, 504), answer.text
                assert answer.json()["error"]["message"]

    async def storm() -> None:
        for _ in range(NUM_RESTARTS):
            nats_server.kill()
            await nats_server.restart()
        over.set()

    async with asyncio.timeout(WATCHDOG_S):
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(load())
            group.create_task(storm())
        while (await ask(client, model, "and now")).status_code != 200:
            continue
        for number in range(10):
            answer = await ask(client, model, f"after {number}")
            assert answer.json()["choices"][0]["text"] == expected_text(
                f"after {number}", MAX_TOKENS
            )
        # Whatever was cut off in the middle holds nothing any more.
        while pipeline.heartbeat(Role.DECODE).kv_blocks_free < fake.num_blocks:
            await asyncio.sleep(0)
            await pipeline.table._call_roll()
            await pipeline.broker._control.flush()


@pytest.mark.parametrize("first", ["services", "gateway"])
async def test_the_parts_may_start_before_the_broker(
    first: str, settings: Settings, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    await nats_server.stop()
    order = [Role.GATEWAY, *STAGES] if first == "gateway" else [*STAGES, Role.GATEWAY]
    stop = asyncio.Event()
    running = [asyncio.create_task(RUN[role](settings, engine="fake", stop=stop)) for role in order]
    async with asyncio.timeout(WATCHDOG_S):
        while True:
            try:
                assert (await client.get("/ready")).status_code == 503
                break
            except httpx.ConnectError:  # it does not listen yet
                await asyncio.sleep(0)
        await nats_server.restart()
        while (await client.get("/ready")).status_code != 200:
            continue
        answer = await ask(client, settings.model.served_name, "early")
        assert answer.json()["choices"][0]["text"] == expected_text("early", MAX_TOKENS)
        stop.set()
        await asyncio.gather(*running)
