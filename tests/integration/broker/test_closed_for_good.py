"""The broker ends a connection in a way that no reconnect mends: the process ends, and is no zombie."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from headrace.client import Client
from headrace.gateway.service import Gateway
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings, GatewaySettings, Settings
from headrace.shared.subjects import Role, out
from headrace.shared.worker import joined

from ...conftest import Serve

CLOSED = "closed the connection for good"


class LockedServer(NatsServer):
    """A server whose one user can be thrown out."""

    def __init__(self, folder: Path) -> None:
        self._users = folder / "users.conf"
        self._store = folder / "jetstream"
        super().__init__(folder, config=self._users)
        self._write("right")

    def revoke(self) -> None:
        """Change the password under the connected clients."""
        self._write("other")
        self.reload()

    def _write(self, password: str) -> None:
        self._users.write_text(
            f"authorization {{ users: [{{ user: a, password: {password} }}] }}\n"
            f"jetstream {{ store_dir: {json.dumps(str(self._store))} }}\n"
        )


@pytest_asyncio.fixture
async def server(serve: Serve, tmp_path: Path) -> LockedServer:
    server = LockedServer(tmp_path)
    await serve(server)
    return server


@pytest.fixture
def settings(server: LockedServer) -> Settings:
    return Settings(
        broker=BrokerSettings(url=server.url, user="a", password="right"),
        gateway=GatewaySettings(port=0),
    )


async def test_a_worker_ends_with_an_error_and_its_work_is_cancelled(
    server: LockedServer, settings: Settings
) -> None:
    ends: list[str] = []

    async def work() -> None:
        async with joined(
            settings, Role.RENDER, model="m", contract="c", slots=1, stop=asyncio.Event()
        ):
            server.revoke()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

    with pytest.raises(BrokerError, match=CLOSED):
        await work()
    assert ends == ["cancelled"]


async def test_what_waits_for_the_broker_learns_it_at_once(
    server: LockedServer, settings: Settings
) -> None:
    patient = Settings(
        broker=BrokerSettings(url=server.url, user="a", password="right", publish_timeout_s=3600.0)
    )
    broker = await Broker.connect(patient.broker, role=Role.RENDER, name="render-1")
    server.revoke()
    with pytest.raises(BrokerError, match=CLOSED):
        await broker.closed_for_good()
    assert not broker.is_connected
    with pytest.raises(BrokerError, match=CLOSED):
        await broker.publish_durable(out("acme", "r1"), b"", message_id="1")
    await broker.close()


async def test_a_gateway_ends_with_an_error(server: LockedServer, settings: Settings) -> None:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    gateway = Gateway(settings, instance="gateway-test")
    serving = asyncio.create_task(gateway.run(asyncio.Event(), on_listening=port.set_result))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}") as client:
        while "broker" in (await client.get("/ready")).json()["status"]:
            continue
        server.revoke()
        with pytest.raises(BrokerError, match=CLOSED):
            await serving


async def test_a_gateway_that_drains_does_not_wait_for_answers_that_will_never_come(
    server: LockedServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `drain_timeout_s` is longer than this test may last."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop, draining = asyncio.Event(), asyncio.Event()
    drain = Gateway._drain

    async def noted(self: Gateway) -> None:
        draining.set()
        await drain(self)

    monkeypatch.setattr(Gateway, "_drain", noted)
    settings = msgspec.structs.replace(
        settings, gateway=msgspec.structs.replace(settings.gateway, drain_timeout_s=3600.0)
    )
    gateway = Gateway(settings, instance="gateway-test")
    serving = asyncio.create_task(gateway.run(stop, on_listening=port.set_result))
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{await port}") as client,
    ):
        while "broker" in (await client.get("/ready")).json()["status"]:
            continue
        gateway._handler._idle.clear()  # as while a call waits for its answer
        stop.set()
        await draining.wait()
        server.revoke()
        with pytest.raises(BrokerError, match=CLOSED):
            await serving


async def test_a_client_that_waits_for_a_result_learns_it(
    server: LockedServer, settings: Settings
) -> None:
    async with Client(settings.broker) as client:
        results = [asyncio.create_task(client.result("r1", 3600))]
        results += [asyncio.create_task(client.run({"model": "m"}, deadline_s=3600))]
        assert client._answers is not None
        while not client._answers._live:  # noqa: ASYNC110 - it waits for the event loop alone
            await asyncio.sleep(0)
        server.revoke()
        for result in results:
            with pytest.raises(BrokerError, match=CLOSED):
                await asyncio.wait_for(result, 60)
