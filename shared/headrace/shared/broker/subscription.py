"""Subscriptions: each message of a subject, handed on in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from headrace.shared.broker.connection import Connection, ConnectionLostError
from headrace.shared.broker.connections import Connections
from headrace.shared.broker.direct import Direct
from headrace.shared.broker.durable import RETRY_S
from headrace.shared.broker.message import Received
from headrace.shared.broker.payloads import Payloads
from headrace.shared.errors import BrokerError

logger = logging.getLogger(__name__)


class Subscription:
    """A live subscription; it survives reconnects."""

    def __init__(self, connection: Connection, inner: NatsSubscription) -> None:
        self._connection = connection
        self._inner = inner
        self._ended = False

    async def unsubscribe(self) -> None:
        """End it; what has arrived is still handled before this returns."""
        if not self._ended:
            self._ended = True
            await self._connection.unsubscribe(self._inner)

    async def drop(self) -> None:
        """End it without a word from the broker: what is on its way to it is not handled."""
        if not self._ended:
            self._ended = True
            await self._connection.drop(self._inner)


async def subscribe(
    connections: Connections,
    payloads: Payloads,
    subject: str,
    handler: Callable[[Received], None],
    *,
    queue: str,
    is_confirmed: bool,
) -> Subscription:
    """Call `handler` with each message, as `Broker.subscribe` says."""

    async def receive(message: Msg) -> None:
        try:
            received = await payloads.received(message)
        except BrokerError as error:
            logger.error(
                "message dropped, its payload can't be read: %s",
                error,
                extra={"action": "blob_unreadable", "subject": message.subject},
            )
            return
        handler(received)

    connection = connections.of(subject)
    while True:
        await connections.wait_until_connected()
        try:
            inner = await connection.subscribe(
                subject,
                Direct(handler, receive),
                queue=queue,
                wait_until_registered=is_confirmed,
            )
        except ConnectionLostError as error:
            logger.info(
                "subscribing again: %s",
                error,
                extra={"action": "resubscribe", "subject": subject},
            )
            await asyncio.sleep(RETRY_S)  # the loss is noticed here a moment later
            continue
        return Subscription(connection, inner)
