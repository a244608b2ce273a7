from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from headrace.cli import own_broker
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role

from ..ports import free_port

TIMEOUT_S = 30.0


def children() -> set[int]:
    """Return the processes that this one started and has not reaped."""
    pid = os.getpid()
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_broker_that_died_is_started_again_at_the_same_address(tmp_path: Path) -> None:
    lines: list[str] = []

    async def scenario() -> None:
        before = children()
        async with own_broker.running(BrokerSettings(), tmp_path, lines.append) as settings:
            (server,) = children() - before
            broker = await Broker.connect(settings, role=Role.GATEWAY, name="test")
            back = asyncio.Event()

            async def on_reconnect() -> None:
                back.set()

            broker.on_reconnect(on_reconnect)
            os.kill(server, signal.SIGKILL)
            await asyncio.wait_for(back.wait(), TIMEOUT_S)
            await broker.close()

    asyncio.run(scenario())
    assert lines == ["broker died; starting it again"]


def test_a_restart_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    five = asyncio.Event()

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) == 5:
            five.set()

    monkeypatch.setattr(own_broker, "AGAIN_S", 0.0)

    async def scenario() -> None:
        before = children()
        async with own_broker.running(BrokerSettings(), tmp_path, report) as settings:
            (server,) = children() - before
            restart, failures = NatsServer.restart, [OSError("no room"), BrokerError("no store")]

            async def restart_at_last(server: NatsServer) -> None:
                if failures:
                    raise failures.pop()
                await restart(server)

            monkeypatch.setattr(NatsServer, "restart", restart_at_last)
            os.kill(server, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                await five.wait()
                broker = await Broker.connect(settings, role=Role.GATEWAY, name="test")
            await broker.close()

    asyncio.run(scenario())
    assert [line.split(";")[0] for line in lines[1::2]] == ["no store", "no room"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_broker_listens_where_everybody_asks_unless_another_one_does(
    tmp_path: Path, is_taken: bool
) -> None:
    async def scenario() -> None:
        url = f"nats://127.0.0.1:{free_port()}"
        with contextlib.ExitStack() as stack:
            if is_taken:
                port = int(url.rpartition(":")[2])
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            async with own_broker.running(
                BrokerSettings(url=url), tmp_path, lambda line: None
            ) as settings:
                assert (settings.url == url) is not is_taken
                broker = await Broker.connect(settings, role=Role.GATEWAY, name="test")
                await broker.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["nats://192.0.2.1:4222", "nats://127.0.0.1:1,nats://127.0.0.1:2"])
def test_a_broker_that_is_not_of_this_machine_leaves_the_port_open(url: str) -> None:
    assert own_broker._port_of(url) == 0


def test_a_broker_with_a_password_takes_only_who_knows_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = BrokerSettings(password="secret")
        async with own_broker.running(own, tmp_path, lambda line: None) as settings:
            assert settings.password == "secret"
            broker = await Broker.connect(settings, role=Role.GATEWAY, name="test")
            await broker.close()

    asyncio.run(scenario())


def test_a_store_that_another_stack_uses_is_refused(tmp_path: Path) -> None:
    with (
        own_broker.locked(tmp_path),
        pytest.raises(SettingsError, match=r"another stack uses .* set up\.store_dir"),
        own_broker.locked(tmp_path),
    ):
        pass


def test_a_store_is_free_again_after_its_stack(tmp_path: Path) -> None:
    with own_broker.locked(tmp_path):
        pass
    with own_broker.locked(tmp_path):
        pass
