from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from headrace.cli import log_level
from headrace.shared.broker import Broker
from headrace.shared.log_level import CHATTY
from headrace.shared.subjects import Role

from .conftest import Pipeline

WATCHDOG_S = 30


class Lines(logging.Handler):
    """The levels that were said to be set, as they come."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if vars(record).get("action") == "log_level":
            self.heard.put_nowait(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    before = {name: logging.getLogger(name).level for name in ("", CHATTY)}
    handler = Lines()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


async def test_the_processes_of_a_role_log_as_an_operator_says(
    pipeline: Pipeline, lines: Lines
) -> None:
    await pipeline.start(Role.DERENDER, Role.RENDER)
    broker: Broker = pipeline.broker
    async with asyncio.timeout(WATCHDOG_S):
        await log_level.tell(broker, [Role.DERENDER], "error")
        assert await lines.heard.get() == "log level is error"
        assert logging.getLogger("headrace").getEffectiveLevel() == logging.ERROR
        await log_level.tell(broker, [Role.DECODE, Role.RENDER], "debug")
        assert await lines.heard.get() == "log level is debug"
        assert logging.getLogger("headrace").getEffectiveLevel() == logging.DEBUG
    assert lines.heard.empty()  # decode has no process
