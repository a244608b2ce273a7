"""Streams that hold one message a subject, as a store: written by compare-and-set, read by name.

A record is such a message, and a part of a file's content.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from nats.aio.msg import Msg

from headrace.shared.broker import stored
from headrace.shared.broker.connection import Connection
from headrace.shared.broker.durable import MESSAGE_ID_HEADER, DurablePublisher
from headrace.shared.broker.jetstream import ApiError, api
from headrace.shared.broker.topology import Topology
from headrace.shared.errors import BrokerError, PayloadTooLargeError

PART_BYTES = 2**20
PAGE = 8  # parts that are read at once: the memory that a reader takes
PAGE_BYTES = 8 * PART_BYTES
_MANY = 256  # subjects in one question
_NO_MESSAGE = 10037


@dataclass(frozen=True, slots=True)
class Document:
    """One message of such a stream."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]  #: none is an empty mapping
    sequence: int  #: in the stream: its revision


class Documents:
    """Every method raises DeniedError where this user may not, or BrokerError."""

    def __init__(
        self,
        connection: Connection,
        publisher: DurablePublisher,
        topology: Topology,
        wait_until_connected: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._publisher = publisher
        self._topology = topology
        self._wait_until_connected = wait_until_connected

    @property
    def part_bytes(self) -> int:
        """How large a part of something may be that does not fit into one message."""
        return min(PART_BYTES, self.max_bytes)

    @property
    def max_bytes(self) -> int:
        """How large a message may be."""
        return self._connection.max_payload // 2

    async def store(
        self,
        subject: str,
        payload: bytes,
        *,
        expect: int | None,
        headers: Mapping[str, str] | None = None,
    ) -> int | None:
        """Store it and return its sequence.

        None: the subject's last message is another one than `expect` (its sequence; 0: none. None: whatever it is).
        Raises: PayloadTooLargeError, QueueFullError when the store is full.
        """
        if len(payload) > self.max_bytes:
            raise PayloadTooLargeError(
                f"{subject}: {len(payload):,} bytes exceed {self.max_bytes:,}, half of the broker's max_payload"
            )
        # The ID is this call's own: trying again stores nothing twice, and two calls never hide each other.
        return await self._publisher.publish(
            self._stream(subject),
            subject,
            payload,
            {**(headers or {}), MESSAGE_ID_HEADER: uuid.uuid4().hex},
            expect_last=expect,
        )

    async def last(self, subject: str) -> Document | None:
        """Return what a subject holds, as the stream's leader says it: what was stored before is seen."""
        await self._wait_until_connected()
        try:
            found = await api(
                self._connection,
                f"STREAM.MSG.GET.{self._stream(subject)}",
                {"last_by_subj": subject},
            )
        except ApiError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            raise
        message = found["message"]
        return Document(
            subject=message["subject"],
            payload=base64.b64decode(message.get("data") or ""),
            headers=_headers(base64.b64decode(message.get("hdrs") or "")),
            sequence=int(message["seq"]),
        )

    async def names(self, pattern: str) -> list[str]:
        """Return the subjects of a pattern that hold a message, in no order."""
        await self._wait_until_connected()
        found: list[str] = []
        while True:
            info = await api(
                self._connection,
                f"STREAM.INFO.{self._stream(pattern)}",
                {"subjects_filter": pattern, "offset": len(found)},
            )
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= int(info.get("total", 0)):
                return found

    async def many(self, subjects: Iterable[str]) -> dict[str, Document]:
        """Return what so many subjects of one stream hold, by subject; one that holds nothing is missing.

        In a cluster it may be what they held a moment ago.
        """
        await self._wait_until_connected()
        wanted = list(subjects)
        found: dict[str, Document] = {}
        for start in range(0, len(wanted), _MANY):
            asked = wanted[start : start + _MANY]
            while asked:
                page = await stored.read_last_of_many(
                    self._connection, self._stream(asked[0]), asked
                )
                if not page:
                    break
                found |= {document.subject: document for document in map(_document, page)}
                # A page ends after so many bytes; what is left is asked for again.
                asked = [subject for subject in asked if subject not in found]
        return found

    async def read(
        self, pattern: str, *, first_seq: int = 0, page: int = PAGE
    ) -> AsyncGenerator[Document]:
        """Yield the messages of a pattern, from a sequence on, in the order in which they were stored.

        `page`: how many are asked for, and held, at a time.
        """
        await self._wait_until_connected()
        pages = stored.read_batches(
            self._connection,
            self._stream(pattern),
            pattern,
            first_seq=first_seq,
            batch=page,
            max_bytes=PAGE_BYTES,
        )
        async for messages in pages:
            for message in messages:
                yield _document(message)

    async def purge(self, pattern: str) -> None:
        """Take out every message of a pattern."""
        await self._wait_until_connected()
        await api(self._connection, f"STREAM.PURGE.{self._stream(pattern)}", {"filter": pattern})

    def _stream(self, subject: str) -> str:
        stream = self._topology.stream_of(subject)
        if stream is None:
            raise BrokerError(f"{subject} is captured by no stream")
        return stream.name


def _document(message: Msg) -> Document:
    headers = message.headers or {}
    return Document(headers["Nats-Subject"], message.data, headers, int(headers[stored.SEQUENCE]))


def _headers(data: bytes) -> dict[str, str]:
    lines = data.decode().split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name: value.strip() for name, _, value in pairs}
