"""The time in which a batch's lines are run: its results are stored meanwhile, its record is kept, its end watched."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from headrace.batch.checkpoint import Checkpoint
from headrace.batch.order import Item
from headrace.batch.ownership import Owned, persist
from headrace.batch.runner import Halt, Halting, Runner
from headrace.batch.submitting import Submitter
from headrace.batch.window import Window
from headrace.shared import spans
from headrace.shared.batches import CANCELLED_CODE, EXPIRED_CODE, BatchRecord
from headrace.shared.intake import all_or_none, guarded
from headrace.shared.worker import Worker

TELL_S = 1.0  # between two updates of a batch's counts
LOOK_S = 5.0  # between two looks whether it is to be cancelled, beside being told
REASON = "its batch was cancelled, or is past its completion window"
CODES: dict[Halt, str] = {"cancelled": CANCELLED_CODE, "expired": EXPIRED_CODE}


class Running:
    """One owner's time with a batch whose input is known to be right."""

    def __init__(
        self,
        worker: Worker,
        owned: Owned,
        checkpoint: Checkpoint,
        submitter: Submitter,
        window: Window,
        halting: Halting,
        items: Callable[[], AsyncIterator[Item]],
    ) -> None:
        """`items` yields every line of the input, always in the same order."""
        self._worker = worker
        self._owned = owned
        self._checkpoint = checkpoint
        self._submitter = submitter
        self._halting = halting
        self._changed = asyncio.Event()
        self._runner = Runner(
            items,
            checkpoint,
            submitter,
            window,
            halting,
            is_first_owner=owned.record.epoch == 1,
        )

    def record_changed(self) -> None:
        """Somebody has written the batch's record: look at it."""
        self._changed.set()

    @property
    def is_done(self) -> bool:
        """Whether every line has its result."""
        return self._checkpoint.num_done >= self._owned.record.counts.total

    async def run(self) -> None:
        """Return when every line has its result, or this worker ends; what has come is stored then.

        Raises: NotOwnerError, InputError, FileGoneError.
        """
        self._look()
        started, num_before = time.time(), self._checkpoint.num_done
        own = self._submitter.traceparent = self._worker.tracer.begin(None)
        try:
            await guarded(
                all_or_none([self._checkpoint.run(), self._lines()]),
                all_or_none([self._tell(), self._watch(), self._expire()]),
            )
        finally:
            await self._runner.abandon()
            spans.batch_ran(
                self._worker.tracer,
                own,
                batch_id=self._owned.record.id,
                num_lines=self._checkpoint.num_done - num_before,
                start=started,
                end=time.time(),
            )

    async def _lines(self) -> None:
        """Run the lines, and bring those that may not run any more to their end."""
        if not self.is_done:
            await persist(self._runner.run, "running the lines")
        if not self.is_done and (code := CODES.get(self._halting.reason or "drained")):
            await persist(partial(self._runner.sweep, code, self._cancel), "ending the lines")
        await self._runner.abandon()
        self._checkpoint.close()

    async def _cancel(self, request_id: str) -> None:
        await self._worker.cancel(self._owned.tenant, request_id, REASON)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            await self._owned.change(partial(progress, self._checkpoint))

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            await self._owned.refresh()
            self._look()

    async def _expire(self) -> None:
        await asyncio.sleep(max(0.0, self._owned.record.expires_at - time.time()))
        self._halting.halt("expired")
        await asyncio.Event().wait()  # what guards ends with what it guards

    def _look(self) -> None:
        if self._owned.record.status == "cancelling":
            self._halting.halt("cancelled")
        elif self._owned.record.expires_at <= time.time():
            self._halting.halt("expired")


def progress(checkpoint: Checkpoint, record: BatchRecord) -> dict[str, Any]:
    """Return what is to be changed of a batch's record so that it tells what its files hold."""
    output, errors = checkpoint.output.content, checkpoint.errors.content
    changes: dict[str, Any] = {
        "counts": checkpoint.counts(record.counts.total),
        "usage": output.usage if output.lines else None,
        "output_file_id": checkpoint.output.file_id if output.lines else None,
        "error_file_id": checkpoint.errors.file_id if errors.lines else None,
    }
    if changes["counts"] != record.counts:
        changes["num_idle_owners"] = 0
    return changes
