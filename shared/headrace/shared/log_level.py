"""The log level of processes that run: an operator changes it for all of one role, over NATS."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from headrace.shared import subjects, wire
from headrace.shared.errors import WireError
from headrace.shared.messages import LogLevel
from headrace.shared.subjects import Role

if TYPE_CHECKING:
    from headrace.shared.broker import Broker, Received

logger = logging.getLogger(__name__)

CHATTY = "httpx"  # a line for each of its requests


def set_level(level: str) -> None:
    """Write what is at least as grave as `level`: debug, info, warning or error."""
    logging.getLogger().setLevel(level.upper())
    logging.getLogger(CHATTY).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)


@asynccontextmanager
async def following(broker: Broker, role: Role) -> AsyncIterator[None]:
    """Do as `log_level.v1` says while the block runs. Raises: BrokerError."""

    def change(received: Received) -> None:
        try:
            told = wire.decode(received.payload, LogLevel)
        except WireError as error:
            logger.warning(
                "unreadable log level: %s", error, extra={"action": "log_level_unreadable"}
            )
            return
        set_level(
            "info"
        )  # for this line: who reads along sees when it changed, whatever it was and will be
        logger.info("log level is %s", told.level, extra={"action": "log_level"})
        set_level(told.level)

    subscription = await broker.subscribe(subjects.log_level(role), change)
    try:
        yield
    finally:
        await subscription.unsubscribe()
