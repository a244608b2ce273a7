"""Claim-check: a payload too large for one message is stored in parts, and the message carries its ref.

A ref is `<blob id>.<number of parts>.<bytes>.<sha256>`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from headrace.shared import subjects
from headrace.shared.broker.connection import Connection
from headrace.shared.broker.stored import read_subject
from headrace.shared.broker.streams import BLOB_STREAM
from headrace.shared.errors import BrokerError, MalformedMessageError, PayloadTooLargeError

BLOB_HEADER = "Hr-Blob"
PART_HEADER = "Hr-Part"
TTL_HEADER = "Nats-TTL"

MAX_PAYLOAD_BYTES = 64 * 2**20
PART_BYTES = 2**20
MAX_PARTS = (
    64 * MAX_PAYLOAD_BYTES // PART_BYTES
)  # a broker with a small max_payload has smaller parts


class BlobGoneError(BrokerError):
    """The blob is past its age limit, or was never whole; asking again will not help."""


@dataclass(frozen=True, slots=True)
class _Ref:
    blob_id: str
    num_parts: int
    num_bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.blob_id}.{self.num_parts}.{self.num_bytes}.{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> _Ref:
        try:
            blob_id, num_parts, num_bytes, sha256 = text.split(".")
            ref = cls(
                subjects.check_token(blob_id, "blob_id"), int(num_parts), int(num_bytes), sha256
            )
            if not (0 <= ref.num_parts <= MAX_PARTS and 0 <= ref.num_bytes <= MAX_PAYLOAD_BYTES):
                raise ValueError
            return ref
        except (ValueError, MalformedMessageError):
            raise BlobGoneError(
                f"blob ref must be <id>.<parts>.<bytes>.<sha256>, got {text!r}"
            ) from None


def check_size(subject: str, num_bytes: int) -> None:
    """Raises: PayloadTooLargeError above the limit for one payload, however it is carried."""
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise PayloadTooLargeError(
            f"payload of {num_bytes:,} bytes for {subject} exceeds the limit of "
            f"{MAX_PAYLOAD_BYTES:,} bytes for one message"
        )


async def put(
    publish: Callable[[str, bytes, str, Mapping[str, str]], Awaitable[object]],
    data: bytes,
    *,
    ttl_s: int,
    part_bytes: int,
) -> str:
    """Store `data` in parts for `ttl_s` seconds and return its ref.

    `publish(subject, payload, message_id, headers)` must store one part.
    """
    check_size("a blob", len(data))
    parts = [data[i : i + part_bytes] for i in range(0, len(data), part_bytes)]
    ref = _Ref(uuid.uuid4().hex, len(parts), len(data), hashlib.sha256(data).hexdigest())
    subject = subjects.blob(ref.blob_id)
    for number, part in enumerate(parts):
        headers = {PART_HEADER: str(number), TTL_HEADER: f"{ttl_s}s"}
        await publish(subject, part, f"{ref.blob_id}.{number}", headers)
    return str(ref)


async def get(connection: Connection, text: str) -> bytes:
    """Return what a ref stands for. Raises: BlobGoneError, or BrokerError when the broker fails."""
    ref = _Ref.parse(text)
    messages = await read_subject(connection, BLOB_STREAM, subjects.blob(ref.blob_id))
    parts = {int((m.headers or {}).get(PART_HEADER, "-1")): m.data for m in messages}
    data = (
        b"".join(parts[number] for number in sorted(parts)) if len(parts) == ref.num_parts else b""
    )
    if (
        len(parts) != ref.num_parts
        or len(data) != ref.num_bytes
        or hashlib.sha256(data).hexdigest() != ref.sha256
    ):
        raise BlobGoneError(
            f"blob {ref.blob_id}: {len(messages)} of {ref.num_parts} parts are left; it is past its age limit "
            "or was changed"
        )
    return data
