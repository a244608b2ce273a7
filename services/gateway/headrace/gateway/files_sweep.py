"""What no request does any more: files past their time, rests of uploads that broke off, batches never enqueued.

Every gateway looks now and then; two that find the same do it once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.gateway.batches import Batches
from headrace.gateway.errors import NotFoundError, StateConflictError
from headrace.gateway.files import Files, is_expired
from headrace.gateway.pace import Pace
from headrace.shared.batches import BatchRecord, DraftRecord, FileRecord
from headrace.shared.errors import BrokerError, QueueFullError

logger = logging.getLogger(__name__)


class Sweeper:
    """Looks through all tenants' files and batches."""

    def __init__(
        self,
        files: Files,
        batches: Batches,
        *,
        pace: Pace,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._batches = batches
        self._pace = pace
        self._clock = clock

    async def run(self) -> None:
        """Sweep again and again, until cancelled."""
        while True:
            try:
                await self.sweep()
            except (BrokerError, QueueFullError) as error:
                logger.warning("sweep broke off: %s", error, extra={"action": "sweep_failed"})
            await asyncio.sleep(self._pace.sweep_s)

    async def sweep(self) -> None:
        """Look once. Raises: BrokerError, QueueFullError."""
        records, now = self._files.records, self._clock()
        async for file in records.every("file", FileRecord):
            if is_expired(file.value, now):
                await self._expire(file.tenant, file.record_id)
        async for draft in records.every("draft", DraftRecord):
            # The upload of a younger one may go on.
            if draft.value.since + 2 * self._pace.upload_timeout_s <= now:
                await self._remove_rest(draft.tenant, draft.record_id)
        async for batch in records.every("batch", BatchRecord):
            # Its gateway may have died before it could say so; any other waits already, or runs.
            if not batch.value.is_over:
                await self._batches.enqueue(batch.tenant, batch.record_id)

    async def _expire(self, tenant: str, file_id: str) -> None:
        try:
            await self._files.remove(tenant, file_id)
        except (NotFoundError, StateConflictError):
            return  # it is gone, or a batch needs it: next time
        self._tell("file deleted, it is past its time", file_id)

    async def _remove_rest(self, tenant: str, file_id: str) -> None:
        """Remove what an upload or a deletion left that broke off."""
        if not await self._files.records.has("file", tenant, file_id):
            await self._files.store.delete(tenant, file_id)
            self._tell("what was left of a file removed", file_id)
        await self._files.forget_draft(tenant, file_id)

    def _tell(self, what: str, file_id: str) -> None:
        logger.info("%s: %s", what, file_id, extra={"action": "file_swept", "file_id": file_id})
