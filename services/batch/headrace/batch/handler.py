"""One batch, from whatever state its last owner has left it in, to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec

from headrace.batch.checkpoint import Checkpoint
from headrace.batch.errors import InputError
from headrace.batch.files import ResultFiles
from headrace.batch.inbox import Inbox
from headrace.batch.order import Item, ordered, split
from headrace.batch.ownership import Owned, persist
from headrace.batch.runner import MAX_WINDOW, Halting
from headrace.batch.running import Running, progress
from headrace.batch.submitting import Submitter
from headrace.batch.validation import validate
from headrace.batch.window import Window
from headrace.shared.batch_lines import Parser
from headrace.shared.batches import (
    EXPIRED_CODE,
    BatchCounts,
    BatchError,
    BatchRecord,
    BatchStatus,
    FileRecord,
)
from headrace.shared.errors import FileGoneError
from headrace.shared.files import FileStore
from headrace.shared.records import Records
from headrace.shared.served_models import Models
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

MAX_IDLE_OWNERS = 10


class BatchHandler:
    """Runs one batch as its owner."""

    def __init__(
        self,
        worker: Worker,
        records: Records,
        store: FileStore,
        inbox: Inbox,
        models: Models,
        owned: Owned,
        *,
        max_lines: int,
    ) -> None:
        self._worker = worker
        self._records = records
        self._store = store
        self._inbox = inbox
        self._models = models
        self._owned = owned
        self._max_lines = max_lines
        self._halting = Halting()
        self._running: Running | None = None

    def drain(self) -> None:
        """Stop soon, and leave the batch to another owner."""
        self._halting.halt("drained")

    def record_changed(self) -> None:
        """Somebody has written the batch's record: look at it."""
        if self._running is not None:
            self._running.record_changed()

    async def run(self) -> None:
        """Return when the batch is over, or this worker ends: its record says which.

        Raises: NotOwnerError.
        """
        try:
            await self._run()
        except InputError as error:
            await self._fail([BatchError(code="invalid_input_file", message=str(error))])
        except FileGoneError as error:
            await self._fail([BatchError(code="input_file_gone", message=str(error))])

    async def _run(self) -> None:
        if self._owned.record.num_idle_owners > MAX_IDLE_OWNERS:
            message = f"{MAX_IDLE_OWNERS} batch workers in a row brought it no further"
            await self._fail([BatchError(code="server_error", message=message)])
            return
        if self._owned.record.in_progress_at is None:
            await self._begin()
        if self._owned.record.in_progress_at is None:
            return  # it is over
        record, tenant = self._owned.record, self._owned.tenant
        files = ResultFiles(self._records, self._store, tenant)
        await persist(partial(files.open, record), "opening the files")
        checkpoint = Checkpoint(self._store, tenant, record.id, record.epoch)
        await persist(checkpoint.take_over, "reading the files")
        window = Window(lambda: min(MAX_WINDOW, self._models.concurrency))
        submitter = Submitter(self._worker.broker, self._inbox, window, self._owned)
        self._running = Running(
            self._worker,
            self._owned,
            checkpoint,
            submitter,
            window,
            self._halting,
            self._items,
        )
        async with AsyncExitStack() as stack:
            listening = self._inbox.listening(tenant)
            await persist(partial(stack.enter_async_context, listening), "hearing results")
            await self._running.run()
        if self._running.is_done:
            await self._finish(checkpoint, files)
        elif self._halting.reason == "drained":
            await self._owned.change(lambda _: {"num_idle_owners": 0})
        else:
            raise InputError("the input has fewer lines than were validated")

    async def _begin(self) -> None:
        """Look whether the input is right, and let the batch begin, or end here."""
        record = self._owned.record
        if record.status == "cancelling":
            await self._end("cancelled")
            return
        source = await self._input()
        found = await persist(
            lambda: validate(
                split(self._data(source)),
                url=record.endpoint,
                max_lines=self._max_lines,
                check_model=self._models.check,
            ),
            "reading the input",
        )
        if found.errors:
            await self._fail(found.errors)
            return

        def begin(newest: BatchRecord) -> dict[str, Any]:
            is_cancelled = newest.status == "cancelling"
            return {
                "status": newest.status if is_cancelled else "in_progress",
                "in_progress_at": int(time.time()),
                "model": found.model,
                "counts": BatchCounts(total=found.num_lines),
                "num_idle_owners": 0,
            }

        await self._owned.change(begin)
        await self.tell()

    async def _finish(self, checkpoint: Checkpoint, files: ResultFiles) -> None:
        """Let the files be whole, then say how the batch ended."""
        output, errors = checkpoint.output, checkpoint.errors

        def finalize(newest: BatchRecord) -> dict[str, Any]:
            changes = progress(checkpoint, newest)
            if newest.status == "in_progress":
                changes |= {"status": "finalizing", "finalizing_at": int(time.time())}
            return changes

        await self._owned.change(finalize)
        for log in (output, errors):
            await persist(partial(files.finish, log.file_id, log.content), "ending the files")
        is_expired = errors.content.swept == EXPIRED_CODE
        await self._end("expired" if is_expired else "completed")

    async def _fail(self, errors: Sequence[BatchError]) -> None:
        await self._end("failed", errors=tuple(errors))

    async def _end(self, status: BatchStatus, **more: Any) -> None:
        """End the batch; one that is to be cancelled ends so, unless it failed."""

        def end(newest: BatchRecord) -> dict[str, Any]:
            is_cancelled = newest.status == "cancelling" and status != "failed"
            last: BatchStatus = "cancelled" if is_cancelled else status
            return {"status": last, f"{last}_at": int(time.time()), **more}

        await self._owned.change(end)

    async def tell(self) -> None:
        """Tell whoever listens to events what has become of the batch; told again, it is the same event."""
        record = self._owned.record
        await persist(lambda: tell(self._worker, self._owned.tenant, record), "telling the event")

    async def _items(self) -> AsyncIterator[Item]:
        source = await self._input()
        lines = split(self._data(source))
        async for item in ordered(lines, Parser(url=self._owned.record.endpoint)):
            yield item

    async def _input(self) -> FileRecord:
        file_id = self._owned.record.input_file_id
        found = await persist(
            lambda: self._records.get("file", self._owned.tenant, file_id, FileRecord),
            "looking at the input",
        )
        if found is None:
            raise FileGoneError(f"file {file_id} was deleted")
        return found[0]

    async def _data(self, source: FileRecord) -> AsyncIterator[bytes]:
        async for part in self._store.parts(
            self._owned.tenant, source.id, num_parts=source.num_parts
        ):
            yield part.data


async def tell(worker: Worker, tenant: str, batch: BatchRecord) -> None:
    """Tell a batch's status as an event. Raises: BrokerError."""
    counts = msgspec.to_builtins(batch.counts)
    logger.info(
        "batch is %s",
        batch.status,
        extra={
            "action": "batch_status",
            "status": batch.status,
            "batch_id": batch.id,
            "tenant": tenant,
            **counts,
        },
    )
    await worker.events.batch(tenant, batch.id, batch.status, {"request_counts": counts})
