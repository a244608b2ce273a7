"""The records of a batch's two files, from the first owner on until they are whole."""

from __future__ import annotations

import time

import msgspec

from headrace.batch.part_log import Content
from headrace.shared.batches import BatchRecord, FileRecord, error_file_id, output_file_id
from headrace.shared.errors import ConflictError
from headrace.shared.files import FileStore
from headrace.shared.records import Records


class ResultFiles:
    """What clients see of the files that one batch's results go to."""

    def __init__(self, records: Records, store: FileStore, tenant: str) -> None:
        self._records = records
        self._store = store
        self._tenant = tenant

    async def open(self, batch: BatchRecord) -> None:
        """Let both be seen, as they grow. Raises: BrokerError."""
        for file_id, kind in (
            (output_file_id(batch.id), "output"),
            (error_file_id(batch.id), "error"),
        ):
            now = int(time.time())
            after_s = batch.output_expires_after_s
            record = FileRecord(
                id=file_id,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                created_at=now,
                state="live",
                expires_at=None if after_s is None else now + after_s,
            )
            if await self._records.get("file", self._tenant, file_id, FileRecord) is None:
                try:
                    await self._records.put("file", self._tenant, file_id, record, expect=0)
                except ConflictError:
                    continue  # an earlier owner, which lives still

    async def finish(self, file_id: str, content: Content) -> None:
        """Let one be whole; where it has no line, there is none. Raises: BrokerError."""
        while True:
            found = await self._records.get("file", self._tenant, file_id, FileRecord)
            if found is None:
                return  # it was empty
            record, revision = found
            try:
                if not content.lines:
                    await self._records.delete("file", self._tenant, file_id, expect=revision)
                    await self._store.delete(self._tenant, file_id)
                    return
                whole = msgspec.structs.replace(
                    record, state="whole", num_bytes=content.num_bytes, num_parts=content.num_parts
                )
                await self._records.put("file", self._tenant, file_id, whole, expect=revision)
                return
            except ConflictError:
                continue
