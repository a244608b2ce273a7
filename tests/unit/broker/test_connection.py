from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from nats import errors

from headrace.shared.broker.connection import Connection
from headrace.shared.broker.outage_log import SLOW_INTERVAL_S
from headrace.shared.settings import BrokerSettings

TIMEOUT_S = 30.0


class Attempts(logging.Handler):
    """The records of attempts that found no broker, whatever their level."""

    def __init__(self) -> None:
        super().__init__()
        self._records: asyncio.Queue[logging.LogRecord] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__.get("action") == "broker_unreachable":
            self._records.put_nowait(record)

    async def next(self) -> logging.LogRecord:
        return await asyncio.wait_for(self._records.get(), TIMEOUT_S)


def test_a_broker_that_is_not_there_is_named_once_and_then_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0

    async def scenario(port: int) -> list[logging.LogRecord]:
        nonlocal now
        attempts = Attempts()
        logger = logging.getLogger("headrace.shared.broker")
        logger.addHandler(attempts)
        connection = Connection("t", lambda: None, lambda: None, clock=lambda: now)
        settings = BrokerSettings(url=f"nats://me:secret@127.0.0.1:{port}")
        opening = asyncio.create_task(connection.open(settings, "", "_INBOX"))
        try:
            found = [await attempts.next() for _ in range(3)]
            now += 10
            found += [await attempts.next() for _ in range(2)]
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await connection.close()
            logger.removeHandler(attempts)
        return found

    caplog.set_level(logging.DEBUG, "headrace.shared.broker")
    with socket.socket() as nobody:  # bound, so that no other process listens there
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        found = asyncio.run(scenario(port))
    assert [record.levelno for record in found] == [
        *(logging.WARNING, logging.DEBUG, logging.DEBUG),
        *(logging.WARNING, logging.DEBUG),
    ]
    assert f"no broker at nats://127.0.0.1:{port}, trying on: " in found[0].getMessage()


def test_messages_that_are_dropped_are_counted_and_not_told_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0

    async def scenario() -> None:
        nonlocal now
        connection = Connection("t", lambda: None, lambda: None, clock=lambda: now)
        dropped = errors.SlowConsumerError(subject="s", reply="", sid=1, sub=None)  # type: ignore[arg-type]
        for _ in range(50):
            await connection._error(dropped)
        now += SLOW_INTERVAL_S
        await connection._error(dropped)

    asyncio.run(scenario())
    told = [r.getMessage() for r in caplog.records if r.__dict__.get("action") == "slow_consumer"]
    assert told == [f"{count} messages dropped: this process is too slow" for count in (1, 50)]
