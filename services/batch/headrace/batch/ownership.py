"""Whose a batch is: its record says so, and is changed by compare-and-set alone.

An owner that was paused, or cut off, learns with its next write that it has a successor, and stops without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.batch.errors import NotOwnerError
from headrace.shared.batches import BatchRecord
from headrace.shared.errors import BrokerError, ConflictError, QueueFullError
from headrace.shared.records import Records

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
T = TypeVar("T")


async def persist(work: Callable[[], Awaitable[T]], what: str) -> T:
    """Do it, again for as long as the broker is away or full."""
    while True:
        try:
            return await work()
        except (BrokerError, QueueFullError) as error:
            logger.warning("%s: not done yet: %s", what, error, extra={"action": "batch_waits"})
            await asyncio.sleep(AGAIN_S)


class Owned:
    """A batch that this worker owns."""

    def __init__(self, records: Records, tenant: str, record: BatchRecord, revision: int) -> None:
        self._records = records
        self._revision = revision
        self._writing = asyncio.Lock()
        self.tenant = tenant
        self.record = record  #: as it was last read or written

    @classmethod
    async def take(
        cls, records: Records, tenant: str, batch_id: str, instance: str
    ) -> Owned | None:
        """Become the owner of a batch. None: there is nothing to do about it any more. Raises: BrokerError."""
        while True:
            found = await records.get("batch", tenant, batch_id, BatchRecord)
            if found is None or found[0].is_over:
                return None
            record, revision = found
            mine = msgspec.structs.replace(
                record,
                owner=instance,
                epoch=record.epoch + 1,
                num_idle_owners=record.num_idle_owners + 1,
            )
            try:
                revision = await records.put("batch", tenant, batch_id, mine, expect=revision)
            except ConflictError:
                continue
            return cls(records, tenant, mine, revision)

    async def change(self, changes: Callable[[BatchRecord], dict[str, Any]]) -> BatchRecord:
        """Write what `changes` makes of the newest record, however long the broker is away, and return that.

        Raises: NotOwnerError.
        """
        async with self._writing:
            while True:
                wanted = changes(self.record)
                if all(getattr(self.record, name) == value for name, value in wanted.items()):
                    return self.record
                record = msgspec.structs.replace(self.record, **wanted)
                try:
                    self._revision = await persist(
                        partial(self._put, record, self._revision), "changing the record"
                    )
                except ConflictError:
                    await self._read()  # also where an unanswered try of this call was stored
                    continue
                self.record = record
                return record

    async def refresh(self) -> BatchRecord:
        """Read the record again, however long the broker is away. Raises: NotOwnerError."""
        async with self._writing:
            await self._read()
            return self.record

    async def _put(self, record: BatchRecord, expect: int) -> int:
        return await self._records.put("batch", self.tenant, record.id, record, expect=expect)

    async def _read(self) -> None:
        mine = self.record
        found = await persist(
            lambda: self._records.get("batch", self.tenant, mine.id, BatchRecord),
            "reading the record",
        )
        if found is None:
            raise NotOwnerError(f"batch {mine.id} is not there any more")
        record, revision = found
        if (record.owner, record.epoch) != (mine.owner, mine.epoch):
            raise NotOwnerError(f"batch {mine.id} belongs to {record.owner} now")
        self.record, self._revision = record, revision
