"""What an operator sees of streams and takes out of them. A broker with users lets only `admin` do most of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from nats.aio.msg import Msg

from headrace.shared.broker import stored
from headrace.shared.broker.connection import Connection, NoResponderError
from headrace.shared.broker.jetstream import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError, api
from headrace.shared.broker.message import Received

PAGE = 64
GLANCE_BYTES = 2**20
NOT_ENABLED = (10039, 10076)  # JetStream: for this account, on this server


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One message that a stream holds."""

    sequence: int  #: in the stream
    stored: float  #: when it was stored (Unix seconds)
    received: Received


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueInfo:
    """What one consumer of a work queue has to do."""

    filter_subject: str  #: which messages
    num_waiting: int  #: nobody has taken them yet
    num_taken: int  #: taken, and not settled yet
    num_deliveries: int  #: since the consumer was made, those of the same message included
    last_delivered: int  #: stream sequence of the last message that was taken for the first time


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """The broker itself."""

    version: str  #: as `2.15.1`
    max_payload: int  #: of one message, in bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """What JetStream holds for this account."""

    memory_bytes: int
    file_bytes: int
    max_memory_bytes: int  #: -1: no limit of the account's own
    max_file_bytes: int  #: -1: as above


class Admin:
    """Reads and removes by stream. Every method raises DeniedError where this user may not, or BrokerError."""

    def __init__(self, connection: Connection, whole: Callable[[Msg], Awaitable[Received]]) -> None:
        """`whole` puts a payload that was stored in parts together."""
        self._connection = connection
        self._whole = whole

    @property
    def server(self) -> ServerInfo:
        """What the broker said of itself when it was connected to."""
        connection = self._connection
        return ServerInfo(version=connection.server_version, max_payload=connection.max_payload)

    async def store(self) -> StoreInfo | None:
        """Return how full JetStream's stores are; None: this broker has no JetStream."""
        try:
            info = await api(self._connection, "INFO")
        except NoResponderError:
            return None
        except ApiError as error:
            if error.err_code in NOT_ENABLED:
                return None
            raise
        limits = info["limits"]
        return StoreInfo(
            memory_bytes=info["memory"],
            file_bytes=info["storage"],
            max_memory_bytes=limits["max_memory"],
            max_file_bytes=limits["max_storage"],
        )

    async def messages(
        self, stream: str, pattern: str, *, first_seq: int = 0
    ) -> AsyncIterator[Kept]:
        """Yield the messages of a pattern, oldest first; of a stream that is missing, none."""
        pages = stored.read_batches(
            self._connection, stream, pattern, first_seq=first_seq, batch=PAGE
        )
        async for page in pages:
            for message in page:
                yield await self._read(message)

    async def first(
        self, stream: str, pattern: str, *, first_seq: int = 0, num: int = 1
    ) -> list[Kept]:
        """Return the first `num` messages of a pattern; less when they are large, and parts are not put together."""
        batches = stored.read_batches(
            self._connection,
            stream,
            pattern,
            first_seq=first_seq,
            batch=num,
            max_bytes=GLANCE_BYTES,
        )
        async with aclosing(batches):
            async for batch in batches:
                return [_kept(message, _received(message)) for message in batch]
        return []

    async def message(self, stream: str, sequence: int) -> Kept | None:
        """Return one message, or None when the stream does not hold it."""
        try:
            message = await stored.read_sequence(self._connection, stream, sequence)
        except NoResponderError:  # no such stream
            return None
        return None if message is None else await self._read(message)

    async def delete(self, stream: str, sequence: int) -> bool:
        """Take one message out; False when it was not there any more."""
        try:
            await api(
                self._connection,
                f"STREAM.MSG.DELETE.{stream}",
                {"seq": sequence, "no_erase": True},
            )
        except ApiError:  # it has many words for a message that is gone
            if await self.message(stream, sequence) is None:
                return False
            raise
        return True

    async def purge(self, stream: str, pattern: str, *, up_to: int) -> None:
        """Take out the messages of a pattern, up to this stream sequence and with it."""
        await api(self._connection, f"STREAM.PURGE.{stream}", {"filter": pattern, "seq": up_to + 1})

    async def num_messages(self, stream: str) -> int:
        """Return how many messages a stream holds; a stream that is missing holds none."""
        try:
            info = await api(self._connection, f"STREAM.INFO.{stream}")
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                return 0
            raise
        return int(info["state"]["messages"])

    async def queues(self, stream: str) -> list[QueueInfo]:
        """Return the consumers of a work queue; a stream that is missing has none."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                page = await api(
                    self._connection, f"CONSUMER.LIST.{stream}", {"offset": len(found)}
                )
            except ApiError as error:
                if error.err_code == STREAM_NOT_FOUND:
                    return []
                raise
            found += page["consumers"] or ()
            if not page["consumers"] or len(found) >= page["total"]:
                return [_queue_info(consumer) for consumer in found]

    async def queue(self, stream: str, consumer: str) -> QueueInfo | None:
        """Return one consumer of a work queue, or None where it is not declared."""
        try:
            return _queue_info(await api(self._connection, f"CONSUMER.INFO.{stream}.{consumer}"))
        except ApiError as error:
            if error.err_code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
                return None
            raise

    async def _read(self, message: Msg) -> Kept:
        return _kept(message, await self._whole(message))


def _received(message: Msg) -> Received:
    headers = message.headers or {}
    return Received(headers["Nats-Subject"], message.data, headers, "")


def _kept(message: Msg, received: Received) -> Kept:
    headers = message.headers or {}
    return Kept(
        sequence=int(headers[stored.SEQUENCE]),
        stored=datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
        received=received,
    )


def _queue_info(consumer: dict[str, Any]) -> QueueInfo:
    return QueueInfo(
        filter_subject=consumer["config"]["filter_subject"],
        num_waiting=consumer["num_pending"],
        num_taken=consumer["num_ack_pending"],
        num_deliveries=consumer["delivered"]["consumer_seq"],
        last_delivered=consumer["delivered"]["stream_seq"],
    )
