"""Runs the lines of one batch that have no result yet, and tells why it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

from headrace.batch import results
from headrace.batch.checkpoint import Checkpoint
from headrace.batch.order import Item
from headrace.batch.submitting import Submitter
from headrace.batch.window import Window

logger = logging.getLogger(__name__)

Halt = Literal["cancelled", "expired", "drained"]
Items = Callable[[], AsyncIterator[Item]]
Cancel = Callable[[str], Awaitable[None]]

MAX_UNDER_WAY = 4_096
"""An earlier owner's lines that are under way, or have ended and are not stored, are among the first so many that
have no result: lines are begun in the same order by every owner, and no more of them than the window lets, and memory
holds."""
MAX_WINDOW = 1_024
ENDS_WITHIN_S = 10.0  # a request that was cancelled, or is past its deadline


class Halting:
    """Why a batch's lines are not run any more, once it is so."""

    def __init__(self) -> None:
        self.reason: Halt | None = None
        self._set = asyncio.Event()

    def halt(self, reason: Halt) -> None:
        """Begin no further line; the first reason counts, unless it was that this worker ends."""
        if self.reason is None or self.reason == "drained":
            self.reason = reason
            self._set.set()

    async def wait(self) -> None:
        """Return when it is so."""
        await self._set.wait()


class Runner:
    """One owner's run of a batch."""

    def __init__(
        self,
        items: Items,
        checkpoint: Checkpoint,
        submitter: Submitter,
        window: Window,
        halting: Halting,
        *,
        is_first_owner: bool,
    ) -> None:
        """`items` yields every line of the input, always in the same order."""
        self._items = items
        self._checkpoint = checkpoint
        self._submitter = submitter
        self._window = window
        self._halting = halting
        self._num_to_look_up = 0 if is_first_owner else MAX_UNDER_WAY
        self._open: dict[asyncio.Task[None], Item] = {}
        self._open_numbers: set[int] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Return when every line has its result, or no further one may begin; what is under way goes on.

        Raises: InputError, FileGoneError; BrokerError, behind which it goes on when it is called again.
        """
        if self._halting.reason is not None:
            return
        halt = asyncio.create_task(self._halting.wait())
        feed = asyncio.create_task(self._feed())
        try:
            first: set[asyncio.Future[None]] = {halt, self._failed}
            while not halt.done() and not self._failed.done() and (self._open or not feed.done()):
                running = set(self._open) if feed.done() else {feed}
                await asyncio.wait({*first, *running}, return_when=asyncio.FIRST_COMPLETED)
                if feed.done():
                    feed.result()
            if self._failed.done():
                self._failed.result()
        finally:
            for task in (halt, feed):
                task.cancel()
            await asyncio.gather(halt, feed, return_exceptions=True)

    async def abandon(self) -> None:
        """Wait for nothing any more; the requests themselves go on."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def sweep(self, code: str, cancel: Cancel) -> None:
        """Bring the lines that have no result to an end that says `code`; what is under way is cancelled.

        Raises: InputError, FileGoneError, BrokerError.
        """
        begun = set(self._open_numbers)
        for item in self._open.values():
            await cancel(self._submitter.request_id(item))
        if self._open:
            await asyncio.wait(self._open, timeout=ENDS_WITHIN_S)
        await self.abandon()
        async with contextlib.aclosing(self._items()) as items:  # type: ignore[type-var]
            async for item in items:
                if self._checkpoint.has(item.number):
                    continue
                request_id = self._submitter.request_id(item)
                terminal = None
                if item.number in begun or self._may_have_ended():
                    terminal = await self._submitter.stored(item)
                    if terminal is None:
                        await cancel(request_id)
                if terminal is not None:
                    outcome = self._submitter.outcome(
                        item, terminal, self._checkpoint.max_line_bytes
                    )
                else:
                    outcome = results.of_code(request_id, item.request.custom_id, code)
                await self._checkpoint.room()
                self._checkpoint.add(item.number, outcome)

    async def _feed(self) -> None:
        async with contextlib.aclosing(self._items()) as items:  # type: ignore[type-var]
            async for item in items:
                if self._checkpoint.has(item.number) or item.number in self._open_numbers:
                    continue
                may_have_ended = self._may_have_ended()
                await self._checkpoint.room()
                await self._window.enter()
                task = asyncio.create_task(self._bring(item, may_have_ended))
                self._open[task] = item
                self._open_numbers.add(item.number)
                task.add_done_callback(self._ended)

    def _may_have_ended(self) -> bool:
        """Whether an earlier owner may have begun the next line that has no result."""
        self._num_to_look_up -= 1
        return self._num_to_look_up >= 0

    async def _bring(self, item: Item, may_have_ended: bool) -> None:
        terminal = await self._submitter.bring(item, may_have_ended=may_have_ended)
        outcome = self._submitter.outcome(item, terminal, self._checkpoint.max_line_bytes)
        self._checkpoint.add(item.number, outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open_numbers.discard(self._open.pop(task).number)
        self._window.leave()
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)
