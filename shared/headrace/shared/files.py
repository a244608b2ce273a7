"""The contents of files, in parts. What a file is called and whose batches read it, its record says (`batches.py`).

A part is written once: who comes second learns that somebody else writes this file. So a batch has one writer of its
output at a time, whatever its owners believe.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from headrace.shared import subjects
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, ConflictError, FileGoneError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a file."""

    number: int  #: counted from 0
    data: bytes
    headers: Mapping[str, str]  #: those that it was appended with, and some of the store's own


class FileStore(Protocol):
    """Where contents lie. Every method raises BrokerError when the store refuses or is away."""

    @property
    def part_bytes(self) -> int:
        """How large a part should be."""
        ...

    @property
    def max_part_bytes(self) -> int:
        """How large one may be that can't be cut, as a line of a batch's results."""
        ...

    async def append_part(
        self,
        tenant: str,
        file_id: str,
        number: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the next part; `number` is how many there are.

        Raises: ConflictError when there is such a part, QueueFullError when the store is full.
        """
        ...

    def parts(
        self, tenant: str, file_id: str, *, start: int = 0, num_parts: int | None = None
    ) -> AsyncGenerator[Part]:
        """Yield the parts from number `start` on, in order, a few in memory at a time.

        `num_parts`: how many the file has; None: as many as there are now.
        Raises: FileGoneError when one is missing.
        """
        ...

    async def delete(self, tenant: str, file_id: str) -> None:
        """Remove every part; what is not there is no error."""
        ...


class FileWriter:
    """Cuts what it is given into parts, behind a line break where there is one. Ended by an error, it leaves none."""

    def __init__(self, store: FileStore, tenant: str, file_id: str) -> None:
        self._store = store
        self._tenant = tenant
        self._file_id = file_id
        self._held = bytearray()
        self.num_bytes = 0  #: that were written
        self.num_parts = 0  #: that are stored
        self.has_left = False  #: ended by an error, and perhaps there are parts of it still

    async def write(self, data: bytes) -> None:
        """Add to the content. Raises: as `FileStore.append_part`."""
        self.num_bytes += len(data)
        self._held += data
        while len(self._held) >= self._store.part_bytes:
            newline = self._held.rfind(b"\n", 0, self._store.part_bytes)
            await self._store_part(newline + 1 or self._store.part_bytes)

    async def finish(self) -> None:
        """Store what is held back still; nothing may be written from here on. Raises: as `FileStore.append_part`."""
        if self._held:
            await self._store_part(len(self._held))

    async def __aenter__(self) -> FileWriter:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self.finish()
        except BaseException:
            await self._undo()
            raise
        if error is not None:
            await self._undo()

    async def _store_part(self, num_bytes: int) -> None:
        part = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        await self._store.append_part(self._tenant, self._file_id, self.num_parts, part)
        self.num_parts += 1

    async def _undo(self) -> None:
        try:
            await self._store.delete(self._tenant, self._file_id)
        except BrokerError as error:
            self.has_left = True
            logger.warning(
                "parts of a file that is not whole are left behind: %s",
                error,
                extra={"action": "file_parts_left"},
            )


class BrokerFiles:
    """A `FileStore` in JetStream, where headrace's queues are too."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def part_bytes(self) -> int:
        """How large a part should be."""
        return self._broker.documents.part_bytes

    @property
    def max_part_bytes(self) -> int:
        """How large one may be that can't be cut."""
        return self._broker.documents.max_bytes

    async def append_part(
        self,
        tenant: str,
        file_id: str,
        number: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the next part, as `FileStore` says."""
        subject = subjects.file_part(tenant, file_id, number)
        if await self._broker.documents.store(subject, data, expect=0, headers=headers) is None:
            raise ConflictError(f"file {file_id} has a part {number}: somebody else writes it")

    async def parts(
        self, tenant: str, file_id: str, *, start: int = 0, num_parts: int | None = None
    ) -> AsyncGenerator[Part]:
        """Yield the parts, as `FileStore` says."""
        documents = self._broker.documents
        next_number, first_seq = start, 0
        if start > 0:
            first = await documents.last(subjects.file_part(tenant, file_id, start))
            first_seq = first.sequence if first else 0
        if start == 0 or first_seq:
            pattern = subjects.file_parts(tenant, file_id)
            async with aclosing(documents.read(pattern, first_seq=first_seq)) as found:
                async for document in found:
                    number = int(document.subject.rpartition(".")[2])
                    while next_number < number:
                        yield await self._missed(tenant, file_id, next_number)
                        next_number += 1
                    yield Part(number, document.payload, document.headers)
                    next_number = number + 1
        while num_parts is not None and next_number < num_parts:
            yield await self._missed(tenant, file_id, next_number)
            next_number += 1

    async def delete(self, tenant: str, file_id: str) -> None:
        """Remove every part; what is not there is no error."""
        await self._broker.documents.purge(subjects.file_parts(tenant, file_id))

    async def _missed(self, tenant: str, file_id: str, number: int) -> Part:
        """Return a part that the stream's leader has and a replica not yet. Raises: FileGoneError."""
        found = await self._broker.documents.last(subjects.file_part(tenant, file_id, number))
        if found is None:
            raise FileGoneError(f"file {file_id}: part {number} is not there, it was deleted")
        return Part(number, found.payload, found.headers)
