"""The batches of tenants: made, looked at, cancelled, tried again. The batch service runs them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import msgspec

from headrace.gateway.batches_order import BatchOrder
from headrace.gateway.batches_retry import write_rest
from headrace.gateway.errors import MAX_SHOWN_ID, NotFoundError, StateConflictError
from headrace.gateway.files import Files
from headrace.gateway.link import Link
from headrace.shared import subjects
from headrace.shared.batches import BatchRecord, FileRecord
from headrace.shared.errors import (
    BadRequestError,
    ConflictError,
    FileGoneError,
    HeadraceError,
)
from headrace.shared.records import Page, new_id

MAX_LIST = 100


class Batches:
    """The batches of every tenant, each seen by its own alone."""

    def __init__(self, link: Link, files: Files, *, clock: Callable[[], float] = time.time) -> None:
        self._link = link
        self._files = files
        self._clock = clock

    async def create(
        self,
        tenant: str,
        order: BatchOrder,
        *,
        retry_of: str | None = None,
        batch_id: str | None = None,
    ) -> BatchRecord:
        """Make a batch, and have it run; `batch_id`: its ID, None: a new one.

        Raises: RequestError saying what is wrong with it, BrokerError; ConflictError for an ID that is taken.
        """
        await self._check_input(tenant, order.input_file_id)
        batch_id, now = batch_id or new_id("batch_"), int(self._clock())
        await self._files.use(tenant, order.input_file_id, batch_id)
        batch = BatchRecord(
            id=batch_id,
            endpoint=order.endpoint,
            input_file_id=order.input_file_id,
            completion_window=order.completion_window,
            created_at=now,
            expires_at=now + order.window_s,
            metadata=order.metadata,
            output_expires_after_s=order.output_expires_after_s,
            retry_of=retry_of,
        )
        records = self._files.records
        revision = await records.put("batch", tenant, batch_id, batch, expect=0)
        try:
            await self.enqueue(tenant, batch_id)
        except HeadraceError:
            # The client hears that there is no batch, so there must be none.
            try:
                await records.delete("batch", tenant, batch_id, expect=revision)
            except ConflictError:
                return batch  # a worker has it: it was enqueued, and the broker's word of it lost
            raise
        return batch

    async def enqueue(self, tenant: str, batch_id: str) -> None:
        """Have a batch run, unless it waits for that, or runs. Raises: QueueFullError, BrokerError."""
        await self._link.broker.publish_durable(
            subjects.batch(tenant, batch_id), b"", message_id=uuid.uuid4().hex, expect_last=0
        )

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises: NotFoundError."""
        return (await self._found(tenant, batch_id))[0]

    async def list(self, tenant: str, *, after: str | None, limit: int) -> Page[BatchRecord]:
        """Return a tenant's batches, the newest first."""
        return await self._files.records.list(
            "batch", tenant, BatchRecord, after=after, limit=limit
        )

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Have a batch end, and return it as it is then. Raises: NotFoundError; StateConflictError when it is over."""
        while True:
            batch, revision = await self._found(tenant, batch_id)
            if batch.status == "cancelling":
                return batch
            if batch.is_over:
                raise StateConflictError(
                    f"{batch_id} is {batch.status}: it can't be cancelled any more"
                )
            cancelling = msgspec.structs.replace(
                batch, status="cancelling", cancelling_at=int(self._clock())
            )
            try:
                await self._files.records.put(
                    "batch", tenant, batch_id, cancelling, expect=revision
                )
            except ConflictError:  # its owner has changed it
                continue
            return cancelling

    async def retry(
        self,
        tenant: str,
        batch_id: str,
        order_of: Callable[[BatchRecord, str], BatchOrder],
        *,
        retry_id: str | None = None,
    ) -> BatchRecord:
        """Make a batch of the lines of another one that failed or expired.

        `order_of(batch, input file ID)` says what it is to be, `retry_id` is its ID; None: a new one.
        Raises: NotFoundError; StateConflictError when it is not over, or there is no such line.
        """
        batch = await self.get(tenant, batch_id)
        if not batch.is_over:
            raise StateConflictError(
                f"{batch_id} is {batch.status}: wait for its end, or cancel it"
            )
        if batch.error_file_id is None:
            raise StateConflictError(f"{batch_id} has no line that failed or expired")
        order_of(batch, batch.input_file_id)  # what is wrong with it is said before the work
        source = await self._source(tenant, batch.input_file_id)
        errors = await self._source(tenant, batch.error_file_id)
        now, file_id = int(self._clock()), new_id("file-")
        try:
            written = await write_rest(self._files.store, tenant, source, errors, file_id)
        except FileGoneError as error:
            raise NotFoundError(str(error)) from None
        if not written.num_bytes:
            raise StateConflictError(f"{batch_id} has no line that failed or expired")
        record = FileRecord(
            id=file_id,
            filename=source.filename,
            purpose="batch",
            created_at=now,
            num_bytes=written.num_bytes,
            num_parts=written.num_parts,
            expires_at=source.expires_at and now + source.expires_at - source.created_at,
        )
        await self._files.records.put("file", tenant, file_id, record, expect=0)
        try:
            return await self.create(
                tenant, order_of(batch, file_id), retry_of=batch_id, batch_id=retry_id
            )
        except HeadraceError:
            await self._files.delete(tenant, file_id)
            raise

    async def _found(self, tenant: str, batch_id: str) -> tuple[BatchRecord, int]:
        found = await self._files.records.find("batch", tenant, batch_id, BatchRecord)
        if found is None:
            raise NotFoundError(
                f"No batch found with id '{batch_id[:MAX_SHOWN_ID]}'.", param="batch_id"
            )
        return found

    async def _check_input(self, tenant: str, file_id: str) -> None:
        record = await self._source(tenant, file_id)
        if record.purpose != "batch":
            raise BadRequestError(
                f"{file_id} was uploaded with the purpose '{record.purpose}'; the input of a batch "
                "needs the purpose 'batch'",
                param="input_file_id",
            )

    async def _source(self, tenant: str, file_id: str) -> FileRecord:
        try:
            return await self._files.get(tenant, file_id)
        except NotFoundError as error:
            raise NotFoundError(error.message, param="input_file_id") from None
