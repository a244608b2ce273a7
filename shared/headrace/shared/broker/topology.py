"""Streams and consumers as they come to be as they should.

Declared by every process at its start and after each reconnect: memory streams go away with the broker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from headrace.shared.broker.connection import Connection, DeniedError
from headrace.shared.broker.jetstream import (
    STREAM_NAME_IN_USE,
    STREAM_NOT_FOUND,
    ApiError,
    api,
)
from headrace.shared.broker.streams import Stream, matches, streams
from headrace.shared.broker.work_queue import WorkQueue
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 1.0  # a stream without a leader never answers: it is asked again
CONSUMER_TIMEOUT_S = 2.0

#: the role of another service: it declares nothing, and reads its own subjects alone
CLIENT = "client"


class Topology:
    """Declares the streams and consumers that one process uses."""

    def __init__(self, settings: BrokerSettings, role: str) -> None:
        self._replicas = settings.replicas
        self._streams = streams(settings.max_queued_per_subject)
        # With users, the broker's permissions hold each role to its own streams (nats-server.conf).
        self._only = Role(role) if settings.password and role in set(Role) else None
        self._declares = role != CLIENT

    def stream_of(self, subject: str) -> Stream | None:
        """Return the stream that captures a subject, or None."""
        return next(
            (s for s in self._streams if any(matches(f, subject) for f in s.subjects)), None
        )

    async def declare_streams(self, connection: Connection) -> None:
        """Make the streams as they should be. Raises: BrokerError."""
        if not self._declares:
            return
        await asyncio.gather(
            *(
                self._declare_stream(connection, stream)
                for stream in self._streams
                if self._only is None or self._only in stream.roles
            )
        )

    async def declare_consumers(self, connection: Connection, slug: str, pool: str) -> None:
        """Make the consumers of one model and contract as they should be. Raises: BrokerError."""
        await asyncio.gather(
            *(
                self.declare_consumer(connection, queue)
                for queue in WorkQueue.of_model(slug, pool)
                if self._only is None or self._only is queue.role
            )
        )

    async def _declare_stream(self, connection: Connection, stream: Stream) -> None:
        config = stream.config(self._replicas)
        found = await self._stream_config(connection, stream.name)
        if found is None:
            first = {}
            if stream.memory:
                # A sequence that was never used before: an ack of a message of the stream that went away
                # with the broker must not hit a new message.
                first = {"first_seq": time.time_ns() // 10**6}
            try:
                await api(connection, f"STREAM.CREATE.{stream.name}", config | first)
                logger.info("stream created", extra={"action": "declare", "stream": stream.name})
                return
            except ApiError as error:
                if error.err_code != STREAM_NAME_IN_USE:
                    raise
            found = await self._stream_config(connection, stream.name) or {}
        wrong = _differences(config, found)
        if not wrong:
            return
        try:
            # What we don't name stays as it is: an operator may have set placement or a description.
            await api(connection, f"STREAM.UPDATE.{stream.name}", found | config)
            logger.info(
                "stream updated: %s", wrong, extra={"action": "declare", "stream": stream.name}
            )
        except (DeniedError, ApiError) as error:
            logger.warning(
                "stream %s stays as it is (%s), because: %s",
                stream.name,
                wrong,
                error,
                extra={"action": "declare", "stream": stream.name},
            )

    async def _stream_config(self, connection: Connection, name: str) -> dict[str, Any] | None:
        try:
            config: dict[str, Any] = (
                await api(connection, f"STREAM.INFO.{name}", timeout_s=INFO_TIMEOUT_S)
            )["config"]
        except ApiError as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise
            return None
        return config

    async def declare_consumer(self, connection: Connection, queue: WorkQueue) -> None:
        """Make one consumer as it should be. Raises: BrokerError."""
        # Without an "action" the broker creates it, or updates what may be updated.
        await api(
            connection,
            f"CONSUMER.CREATE.{queue.stream}.{queue.consumer}.{queue.filter_subject}",
            {"stream_name": queue.stream, "config": queue.config(self._replicas)},
            timeout_s=CONSUMER_TIMEOUT_S,
        )


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} is {found.get(key)!r} and should be {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    )
