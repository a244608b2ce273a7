"""What a connection says of a broker that goes and comes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from headrace.shared.broker.connection import Connection
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings

TIMEOUT_S = 30.0
LOGGER = "headrace.shared.broker"


class Unreachable(logging.Handler):
    """The levels of the records that say that no broker is there."""

    def __init__(self) -> None:
        super().__init__()
        self._levels: asyncio.Queue[int] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__.get("action") == "broker_unreachable":
            self._levels.put_nowait(record.levelno)

    async def next(self) -> int:
        return await asyncio.wait_for(self._levels.get(), TIMEOUT_S)

    def clear(self) -> None:
        while not self._levels.empty():
            self._levels.get_nowait()


def test_each_outage_is_warned_of_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(unreachable: Unreachable) -> None:
        server = NatsServer(tmp_path)
        await server.start()
        server.kill()
        back = asyncio.Event()
        # its clock stands still, so that no second warning of one outage ever falls due
        connection = Connection("t", lambda: None, back.set, clock=lambda: 0.0)
        opening = asyncio.create_task(connection.open(BrokerSettings(url=server.url), "", "_INBOX"))
        try:
            assert await unreachable.next() == logging.WARNING
            await server.restart()
            await asyncio.wait_for(opening, TIMEOUT_S)
            for _ in range(2):  # after the first connect, and after a reconnect
                unreachable.clear()
                server.kill()
                assert await unreachable.next() == logging.WARNING
                assert await unreachable.next() == logging.DEBUG
                back.clear()
                await server.restart()
                await asyncio.wait_for(back.wait(), TIMEOUT_S)
        finally:
            await connection.close()
            await server.stop()

    caplog.set_level(logging.DEBUG, LOGGER)
    unreachable = Unreachable()
    logging.getLogger(LOGGER).addHandler(unreachable)
    try:
        asyncio.run(scenario(unreachable))
    finally:
        logging.getLogger(LOGGER).removeHandler(unreachable)
