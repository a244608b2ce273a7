"""A PONG that comes when whoever waited for it is gone."""

from __future__ import annotations

import asyncio

from headrace.shared.broker.connection import Connection
from headrace.shared.settings import BrokerSettings

SUBJECT = "hr.v1.kv.abandoned"
TIMEOUT_S = 5.0


async def test_a_subscribe_that_is_cancelled_leaves_a_connection_that_hears(
    broker_settings: BrokerSettings,
) -> None:
    connection = Connection("t", lambda: None, lambda: None)
    await connection.open(broker_settings, "", "_INBOX")
    heard = asyncio.Event()

    async def hear(_: object) -> None:
        heard.set()

    try:
        subscribing = asyncio.create_task(connection.subscribe(SUBJECT, hear))
        while not connection._nc._pongs:  # noqa: ASYNC110  # nats-py has no event for it
            await asyncio.sleep(0)
        subscribing.cancel()
        await asyncio.gather(subscribing, return_exceptions=True)
        await connection.subscribe(SUBJECT, hear)
        await connection.publish(SUBJECT, b"")
        await asyncio.wait_for(heard.wait(), TIMEOUT_S)
    finally:
        await connection.close()
