"""An operator's connection to the broker: it declares nothing, and ends when there is no broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from headrace.shared.broker import CLIENT, Broker
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings

ADMIN = "admin"  # the user of nats-server.conf that may look into streams and change them
CONNECT_TIMEOUT_S = 10.0


@asynccontextmanager
async def connected(settings: BrokerSettings) -> AsyncIterator[Broker]:
    """Give a connection, as `broker.user`, or as `admin` where there is a password and no user.

    Raises: BrokerError when there is no broker, or it refuses this user.
    """
    if settings.password and not settings.user:
        settings = msgspec.structs.replace(settings, user=ADMIN)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            broker = await Broker.connect(settings, role=CLIENT, name=uuid.uuid4().hex[:8])
    except TimeoutError:
        raise BrokerError(
            f"no broker at {settings.shown_url} after {CONNECT_TIMEOUT_S:g} s (broker.url)"
        ) from None
    try:
        yield broker
    finally:
        await broker.close()
