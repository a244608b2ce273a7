"""The whole pipeline on three brokers, of which one is killed under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import msgspec
import pytest
import pytest_asyncio

from headrace.shared.broker.jetstream import api
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from ..broker.cluster import NUM_SERVERS, Cluster
from .conftest import STAGES, Pipeline
from .test_flow import expected_text

NUM_CLIENTS = 4
NUM_REQUESTS = 15  # of each client, after the kill
MAX_TOKENS = 60
WATCHDOG_S = 240.0


@pytest_asyncio.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Three servers, as one: of the fixture's interface only `url` is used."""
    cluster = Cluster(tmp_path)
    await cluster.start()
    yield cast("NatsServer", cluster)
    cluster.kill()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Keep everything three times, and wait for an election."""
    broker = msgspec.structs.replace(settings.broker, replicas=NUM_SERVERS, publish_timeout_s=30.0)
    fake = msgspec.structs.replace(settings.fake, step_s=0.002)
    return msgspec.structs.replace(settings, broker=broker, fake=fake)


async def test_a_leader_that_is_killed_under_load_costs_no_request(
    pipeline: Pipeline, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    cluster = cast("Cluster", nats_server)
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = pipeline.settings.model.served_name
    killed = asyncio.Event()

    async def load(name: str) -> None:
        left = NUM_REQUESTS
        number = 0
        while left:
            prompt = f"{name} asks {number}"
            body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS}
            answer = await client.post("/v1/completions", json=body, timeout=WATCHDOG_S)
            while answer.status_code == 503:  # the gateway was on that server: it says when to ask
                await asyncio.sleep(float(answer.headers["Retry-After"]))
                answer = await client.post("/v1/completions", json=body, timeout=WATCHDOG_S)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected_text(prompt, MAX_TOKENS)
            number += 1
            left -= killed.is_set()

    async def kill() -> None:
        info = await api(pipeline.broker._control, "STREAM.INFO.HR_JOB_RT")
        cluster.server(info["cluster"]["leader"]).kill()
        killed.set()

    async with asyncio.timeout(WATCHDOG_S), asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(load(f"client {number}"))
        group.create_task(kill())
