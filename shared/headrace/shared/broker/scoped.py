"""Reading with the rights to some subjects of a stream alone: the subject stands in the request, where
permissions see it. Slower than `stored`, whose requests could ask for any message of the stream.
"""

from __future__ import annotations

import asyncio
import uuid

from nats.aio.msg import Msg

from headrace.shared.broker.connection import Connection
from headrace.shared.broker.jetstream import STREAM_NOT_FOUND, ApiError, api
from headrace.shared.broker.message import status_of
from headrace.shared.broker.stored import BATCH_TIMEOUT_S, SEQUENCE
from headrace.shared.errors import BrokerError

NO_STREAMS_HERE = 10039  # said in an account that has none of its own
SUBJECT = "Nats-Subject"
READER_S = 5  # after it has been read to its end, the broker forgets a reader


async def read_last(connection: Connection, stream: str, subject: str) -> Msg | None:
    """Return a subject's last message, or None. Raises: BrokerError."""
    message = await connection.request(
        f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout_s=BATCH_TIMEOUT_S
    )
    return None if status_of(message) else message


async def read_subject(
    connection: Connection, stream: str, subject: str, *, first_seq: int = 0
) -> list[Msg]:
    """Return a subject's messages in the order in which they were stored; none is an empty list.

    In an account that may not make readers, which could be told to write anywhere, it is the last one alone.
    Raises: BrokerError.
    """
    inbox = connection.new_inbox()
    messages: list[Msg] = []
    came = asyncio.Event()

    async def receive(message: Msg) -> None:
        # As a direct get says it, which puts its answer in headers.
        stored_at = str(message.metadata.sequence.stream)
        message.headers = {
            **(message.headers or {}),
            SUBJECT: message.subject,
            SEQUENCE: stored_at,
        }
        messages.append(message)
        came.set()

    subscription = await connection.subscribe(inbox, receive, wait_until_registered=False)
    try:
        expected = await _start_reader(connection, stream, subject, inbox, first_seq)
        if expected is None:
            last = await read_last(connection, stream, subject)
            return [] if last is None else [last]
        async with asyncio.timeout(BATCH_TIMEOUT_S):
            while len(messages) < expected:
                came.clear()
                await came.wait()
        return messages
    except TimeoutError:
        raise BrokerError(
            f"reading {subject} from {stream}: {len(messages)} messages within {BATCH_TIMEOUT_S:g} s"
        ) from None
    finally:
        await connection.unsubscribe(subscription)


async def _start_reader(
    connection: Connection, stream: str, subject: str, inbox: str, first_seq: int
) -> int | None:
    """Let the broker send what it holds of a subject to `inbox`, and return how much that is. None: it may not."""
    name = uuid.uuid4().hex
    config = {
        "name": name,
        "filter_subject": subject,
        "deliver_subject": inbox,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(first_seq, 1),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": READER_S * 10**9,
    }
    try:
        made = await api(
            connection,
            f"CONSUMER.CREATE.{stream}.{name}.{subject}",
            {"stream_name": stream, "config": config},
        )
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return 0
        if error.err_code == NO_STREAMS_HERE:
            return None
        raise
    return int(made["num_pending"]) + int(made["delivered"]["consumer_seq"])
