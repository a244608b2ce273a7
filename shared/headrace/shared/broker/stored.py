"""Reading the messages that a stream holds, by direct get: no consumer is made for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from nats.aio.msg import Msg

from headrace.shared.broker.connection import Connection
from headrace.shared.broker.message import description_of, status_of
from headrace.shared.errors import BrokerError

BATCH = 256
BATCH_BYTES = 16 * 2**20  # below the broker's max_pending, or it would drop us as a slow consumer
BATCH_TIMEOUT_S = 10.0

SEQUENCE = "Nats-Sequence"
_PENDING = "Nats-Num-Pending"


async def read_subject(
    connection: Connection, stream: str, subject: str, *, first_seq: int = 0
) -> list[Msg]:
    """Return a subject's messages in the order in which they were stored; none is an empty list.

    Raises: BrokerError.
    """
    found: list[Msg] = []
    async for messages in read_batches(connection, stream, subject, first_seq=first_seq):
        found.extend(messages)
    return found


async def read_batches(
    connection: Connection,
    stream: str,
    subject: str,
    *,
    first_seq: int = 0,
    batch: int = BATCH,
    max_bytes: int = BATCH_BYTES,
) -> AsyncGenerator[list[Msg]]:
    """Yield a subject's messages, so many at a time, in the order in which they were stored. Raises: BrokerError."""
    next_seq = max(first_seq, 1)
    while True:
        messages = await connection.collect(
            f"$JS.API.DIRECT.GET.{stream}",
            msgspec.json.encode(
                {
                    "seq": next_seq,
                    "next_by_subj": subject,
                    "batch": batch,
                    "max_bytes": max_bytes,
                }
            ),
            timeout_s=BATCH_TIMEOUT_S,
            is_last=lambda message: status_of(message) is not None,
        )
        end = messages.pop()
        if messages:
            yield messages
        status = status_of(end)
        if status in ("404", "503"):  # no message from there on; no such stream
            return
        if status != "204":
            raise BrokerError(f"reading {subject} from {stream}: {description_of(end)}")
        if not messages or int((end.headers or {}).get(_PENDING, "0")) == 0:
            return
        next_seq = int((messages[-1].headers or {})[SEQUENCE]) + 1


async def read_sequence(connection: Connection, stream: str, sequence: int) -> Msg | None:
    """Return one message, or None when the stream no longer holds it. Raises: BrokerError."""
    message = await connection.request(
        f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode({"seq": sequence}), timeout_s=5.0
    )
    return None if status_of(message) else message


async def read_last(connection: Connection, stream: str, subject: str) -> Msg | None:
    """Return a subject's last message, or None. Raises: BrokerError."""
    message = await connection.request(
        f"$JS.API.DIRECT.GET.{stream}",
        msgspec.json.encode({"last_by_subj": subject}),
        timeout_s=5.0,
    )
    return None if status_of(message) else message


async def read_last_of_many(
    connection: Connection, stream: str, subjects: list[str], *, max_bytes: int = BATCH_BYTES
) -> list[Msg]:
    """Return the last message of each subject, up to so many bytes; one that has none is missing.

    Raises: BrokerError.
    """
    messages = await connection.collect(
        f"$JS.API.DIRECT.GET.{stream}",
        msgspec.json.encode(
            {"multi_last": subjects, "batch": len(subjects), "max_bytes": max_bytes}
        ),
        timeout_s=BATCH_TIMEOUT_S,
        is_last=lambda message: status_of(message) is not None,
    )
    end = messages.pop()
    if status_of(end) not in ("204", "404", "503"):
        raise BrokerError(f"reading from {stream}: {description_of(end)}")
    return messages
