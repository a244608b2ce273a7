"""Records: small JSON documents by tenant, kind and ID, changed by compare-and-set alone.

Whoever changes one says which revision it has read; if somebody else was faster, it reads again and decides anew.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from headrace.shared import subjects
from headrace.shared.broker import Broker, Document, Received, Subscription
from headrace.shared.errors import ConflictError, MalformedMessageError, PayloadTooLargeError

logger = logging.getLogger(__name__)

Kind = Literal["file", "draft", "batch", "idem", "resp", "hook", "hooklog"]
T = TypeVar("T", bound=msgspec.Struct)

MAX_RECORD_BYTES = 256 * 2**10
TOMBSTONE_S = (
    60  # a record that was deleted leaves its revision for so long, so that a late write fails
)
TTL_HEADER = "Nats-TTL"
PAGE = 64


@dataclass(frozen=True, slots=True)
class Record(Generic[T]):
    """One record as it was read."""

    tenant: str
    record_id: str
    value: T
    revision: int  #: what `put` expects from whoever changes it


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of a list."""

    records: list[Record[T]]
    has_more: bool


class Records:
    """The records of every tenant. Every method raises BrokerError when the broker refuses or is away."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def put(
        self,
        kind: Kind,
        tenant: str,
        record_id: str,
        value: msgspec.Struct,
        *,
        expect: int | None,
        ttl_s: float | None = None,
    ) -> int:
        """Store a record and return its revision; it vanishes after `ttl_s` seconds. None: it stays.

        `expect`: the revision that was read; 0: there is none; None: whatever there is.
        Raises: ConflictError when there is another one, PayloadTooLargeError, MalformedMessageError for an ID that
        fits no subject, QueueFullError when the store is full.
        """
        data = msgspec.json.encode(value)
        if len(data) > MAX_RECORD_BYTES:
            raise PayloadTooLargeError(
                f"{kind} {record_id}: {len(data):,} bytes exceed the limit of {MAX_RECORD_BYTES:,} for a record"
            )
        return await self._write(kind, tenant, record_id, data, expect, ttl_s)

    async def get(
        self, kind: Kind, tenant: str, record_id: str, value_type: type[T]
    ) -> tuple[T, int] | None:
        """Return a record and its revision, or None when there is none.

        Raises: MalformedMessageError when it is no such record, or for an ID that fits no subject.
        """
        found = await self._broker.documents.last(subjects.meta(tenant, kind, record_id))
        if found is None or not found.payload:
            return None
        return _decoded(found, value_type), found.sequence

    async def find(
        self, kind: Kind, tenant: str, record_id: str, value_type: type[T]
    ) -> tuple[T, int] | None:
        """As `get` for an ID that a client names: what could be no record's, or is none, is not there either."""
        try:
            return await self.get(kind, tenant, record_id, value_type)
        except MalformedMessageError:
            return None

    async def has(self, kind: Kind, tenant: str, record_id: str) -> bool:
        """Return whether there is a record, be it readable or not. Raises: MalformedMessageError for an ID."""
        found = await self._broker.documents.last(subjects.meta(tenant, kind, record_id))
        return found is not None and bool(found.payload)

    async def delete(self, kind: Kind, tenant: str, record_id: str, *, expect: int | None) -> None:
        """Delete a record. Raises: ConflictError when it is another one than `expect`."""
        await self._write(kind, tenant, record_id, b"", expect, TOMBSTONE_S)

    async def list(
        self,
        kind: Kind,
        tenant: str,
        value_type: type[T],
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = True,
        where: Callable[[T], bool] = lambda value: True,
    ) -> Page[T]:
        """Return up to `limit` records behind the one named `after`, in the order of their IDs (`new_id`)."""
        prefix = subjects.meta_filter(tenant, kind).removesuffix("*")
        names = await self._broker.documents.names(f"{prefix}*")
        ids = sorted((name.removeprefix(prefix) for name in names), reverse=newest_first)
        if after is not None:
            ids = [i for i in ids if (i < after if newest_first else i > after)]
        found: list[Record[T]] = []
        for start in range(0, len(ids), PAGE):
            page = ids[start : start + PAGE]
            documents = await self._broker.documents.many(f"{prefix}{i}" for i in page)
            for record_id in page:
                document = documents.get(f"{prefix}{record_id}")
                if document is None or not document.payload:
                    continue
                value = _decoded(document, value_type)
                if not where(value):
                    continue
                if len(found) == limit:
                    return Page(found, has_more=True)
                found.append(Record(tenant, record_id, value, document.sequence))
        return Page(found, has_more=False)

    async def every(self, kind: Kind, value_type: type[T]) -> AsyncGenerator[Record[T]]:
        """Yield the records of every tenant, the one first that was changed first; what can't be read is left out.

        In a cluster they may be what they were a moment ago.
        """
        found = self._broker.documents.read(subjects.meta_all(kind), page=PAGE)
        async with aclosing(found):
            async for document in found:
                if not document.payload:
                    continue
                _, _, _, tenant, _, record_id = document.subject.split(".")
                try:
                    value = _decoded(document, value_type)
                except MalformedMessageError as error:
                    logger.error(
                        "a record can't be read: %s", error, extra={"action": "record_unreadable"}
                    )
                    continue
                yield Record(tenant, record_id, value, document.sequence)

    async def watch(self, kind: Kind, changed: Callable[[str, str], None]) -> Subscription:
        """Call `changed(tenant, ID)` whenever somebody writes a record, or tries to: `get` it to see what it is.

        A word that is lost with the broker is not repeated.
        """

        def receive(received: Received) -> None:
            parts = received.subject.split(".")
            changed(parts[3], parts[5])

        return await self._broker.subscribe(subjects.meta_all(kind), receive)

    async def _write(
        self,
        kind: Kind,
        tenant: str,
        record_id: str,
        data: bytes,
        expect: int | None,
        ttl_s: float | None,
    ) -> int:
        subject = subjects.meta(tenant, kind, record_id)
        headers = {} if ttl_s is None else {TTL_HEADER: f"{max(1, math.ceil(ttl_s))}s"}
        documents = self._broker.documents
        revision = await documents.store(subject, data, expect=expect, headers=headers)
        if revision is None and expect == 0:
            last = await documents.last(subject)
            if last is None or not last.payload:  # it was deleted: there is none
                revision = await documents.store(
                    subject, data, expect=last.sequence if last else 0, headers=headers
                )
        if revision is None:
            raise ConflictError(f"{kind} {record_id}: it is not at revision {expect} any more")
        return revision


def new_id(prefix: str) -> str:
    """Return an ID that nobody has: `prefix`, the time, and what cannot be guessed. Later ones are greater."""
    return f"{prefix}{time.time_ns() // 10**6:012x}{os.urandom(10).hex()}"


def _decoded(document: Document, value_type: type[T]) -> T:
    try:
        return msgspec.json.decode(document.payload, type=value_type)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"{document.subject}: {error}") from None
