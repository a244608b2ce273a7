"""Several gateway processes of one machine behind one port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from headrace.gateway.pace import Pace
from headrace.gateway.service import Gateway
from headrace.shared.settings import BrokerSettings, GatewaySettings, Settings, UpSettings

WATCHDOG_S = 60.0


@contextlib.asynccontextmanager
async def one_of_two(broker: BrokerSettings, port: int, name: str) -> AsyncIterator[int]:
    """Run a gateway of a stack that has two; give its port."""
    settings = Settings(broker=broker, gateway=GatewaySettings(port=port), up=UpSettings(gateway=2))
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    gateway = Gateway(settings, instance=name, pace=Pace())
    task = asyncio.create_task(gateway.run(stop, on_listening=listening.set_result))
    await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if task.done():
            task.result()
        yield await listening
    finally:
        stop.set()
        await task


async def test_the_gateways_of_a_stack_share_a_port_and_one_goes_on_without_the_other(
    broker_settings: BrokerSettings,
) -> None:
    async with asyncio.timeout(WATCHDOG_S), contextlib.AsyncExitStack() as first:
        port = await first.enter_async_context(one_of_two(broker_settings, 0, "gateway-a"))
        async with one_of_two(broker_settings, port, "gateway-b") as same:
            assert same == port
            await first.aclose()
            async with httpx.AsyncClient(timeout=WATCHDOG_S) as client:
                assert (await client.get(f"http://127.0.0.1:{port}/health")).is_success
