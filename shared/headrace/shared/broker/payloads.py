"""Payloads into messages and out of them: what is too large for one lies in a blob, and its ref in a header."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from nats.aio.msg import Msg

from headrace.shared.broker import blobs
from headrace.shared.broker.connection import Connection
from headrace.shared.broker.durable import MESSAGE_ID_HEADER, DurablePublisher
from headrace.shared.broker.message import Received
from headrace.shared.broker.streams import BLOB_STREAM

logger = logging.getLogger(__name__)


class Payloads:
    """Every method raises BrokerError where the broker fails."""

    def __init__(self, connection: Connection, durable: DurablePublisher) -> None:
        self._connection = connection
        self._durable = durable

    @property
    def max_bytes(self) -> int:
        """How large a payload may be that goes in one message; the rest is room for its headers."""
        return self._connection.max_payload // 2

    async def check_in(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, blob_ttl_s: int
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return what a message carries: a payload that is too large for it goes into a blob.

        Raises: PayloadTooLargeError, QueueFullError.
        """
        blobs.check_size(subject, len(payload))
        headers = headers or {}
        if len(payload) <= self.max_bytes:
            return payload, headers
        ref = await self.put(payload, ttl_s=blob_ttl_s)
        return b"", {**headers, blobs.BLOB_HEADER: ref}

    async def check_out(
        self, subject: str, headers: Mapping[str, str]
    ) -> tuple[bytes, dict[str, str]]:
        """Return the blob in place of the ref.

        A blob that is gone gives an empty payload and leaves the ref: the receiver refuses the message as it
        refuses any that it can't read, and the dead letter says why.
        """
        rest = dict(headers)
        ref = rest.pop(blobs.BLOB_HEADER)
        try:
            return await self.get(ref), rest
        except blobs.BlobGoneError as error:
            logger.error(
                "payload is gone: %s", error, extra={"action": "blob_gone", "subject": subject}
            )
            return b"", dict(headers)

    async def received(self, message: Msg) -> Received:
        """Return a message that came on its own subject."""
        headers = message.headers or {}
        payload = message.data
        if blobs.BLOB_HEADER in headers:
            payload, headers = await self.check_out(message.subject, headers)
        return Received(message.subject, payload, headers, message.reply)

    async def stored(self, message: Msg) -> Received:
        """Return a message read back from its stream; it comes on an inbox, its own subject in a header."""
        received = await self.received(message)
        return msgspec.structs.replace(received, subject=received.headers["Nats-Subject"], reply="")

    async def put(self, data: bytes, *, ttl_s: int) -> str:
        """Store a blob for `ttl_s` seconds and return its ref. Raises: PayloadTooLargeError, QueueFullError."""
        return await blobs.put(
            self._store_part,
            data,
            ttl_s=ttl_s,
            part_bytes=min(blobs.PART_BYTES, self.max_bytes),
        )

    async def get(self, ref: str) -> bytes:
        """Return what a ref stands for. Raises: BlobGoneError."""
        return await blobs.get(self._connection, ref)

    async def _store_part(
        self, subject: str, payload: bytes, message_id: str, headers: Mapping[str, str]
    ) -> None:
        await self._durable.publish(
            BLOB_STREAM,
            subject,
            payload,
            {**headers, MESSAGE_ID_HEADER: message_id},
            expect_last=None,
        )
