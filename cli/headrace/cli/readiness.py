"""Knows when a stage takes work: its workers' heartbeats, and for the gateway its own `/ready`, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from headrace.cli.silence import Heard
from headrace.cli.supervisor import WaitReady
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role, model_slug
from headrace.shared.workers import WorkerTable

POLL_S = 0.2
BROKER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """What is known of a stack's workers."""

    wait_ready: WaitReady  #: returns when `num` workers of a role are ready
    heard: Heard  #: which processes send heartbeats, once they have loaded


@asynccontextmanager
async def watch(settings: Settings, url: str) -> AsyncIterator[Readiness]:
    """Give what listens to the workers; the gateway is the one at `url`.

    Raises: BrokerError when the broker does not answer.
    """
    broker = await _connect(settings)
    slug = model_slug(settings.model.served_name)
    try:
        async with WorkerTable(broker) as table:
            yield Readiness(_waiter(table, slug, url), _ear(broker, table))
    finally:
        await broker.close()


def _waiter(table: WorkerTable, slug: str, url: str) -> WaitReady:
    async def wait_ready(role: str, num: int) -> None:
        if role == Role.GATEWAY:
            await wait_http(f"{url}/ready")
            await table.wait_for(lambda table: len(table.ready(Role.GATEWAY)) >= num)
        elif role == Role.BATCH:  # for every model
            await table.wait_for(lambda table: len(table.ready(Role.BATCH)) >= num)
        else:
            await table.wait_for(lambda table: len(table.ready(Role(role), slug=slug)) >= num)

    return wait_ready


def _ear(broker: Broker, table: WorkerTable) -> Heard:
    def heard() -> frozenset[str] | None:
        if not broker.is_connected:
            return None
        # One that loads a tokenizer or imports vLLM sends nothing meanwhile, for as long as it takes.
        loaded = (beat for beat in table.workers() if beat.state != "starting")
        return frozenset(beat.process for beat in loaded)

    return heard


async def _connect(settings: Settings) -> Broker:
    try:
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            return await Broker.connect(settings.broker, role=Role.GATEWAY, name="headrace-up")
    except TimeoutError:
        raise BrokerError(
            f"no broker at {settings.broker.shown_url} after {BROKER_TIMEOUT_S:g} s (up.nats_url)"
        ) from None


async def wait_http(url: str) -> None:
    """Return when `url` answers 200."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while not await _is_ok(client, url):  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(POLL_S)


async def _is_ok(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.TransportError:  # not listening yet
        return False
