"""Many requests, a few at a time, and no more of them in memory than that."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
)
from typing import Any, Generic, TypeVar

from headrace.client.results import Result

AHEAD = 4  # times the concurrency: results that wait for an earlier one, where the order is kept

Item = TypeVar("Item")


class Window(Generic[Item]):
    """The requests that run, and the results that nobody has taken yet."""

    def __init__(
        self, run: Callable[[Item], Coroutine[Any, Any, Result]], *, concurrency: int, ordered: bool
    ) -> None:
        """`run` brings one item to its result. Raises: ValueError."""
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._run = run
        self._concurrency = concurrency
        self._ordered = ordered
        self._num_started = 0
        self._running: dict[asyncio.Task[Result], int] = {}
        self._done: dict[
            int, asyncio.Task[Result]
        ] = {}  # index → result, in the order of their ends
        self._next_index = 0
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether a result must be taken before the next item starts."""
        if self._ordered and len(self._running) < self._concurrency:
            return self._num_started - self._next_index >= AHEAD * self._concurrency
        return len(self._running) + len(self._done) >= self._concurrency

    @property
    def is_empty(self) -> bool:
        """Whether every result was taken."""
        return not self._running and not self._done

    def start(self, item: Item) -> None:
        """Begin with the next item."""
        task = asyncio.create_task(self._run(item))
        self._running[task] = self._num_started
        self._num_started += 1
        task.add_done_callback(self._ended)

    def take(self) -> tuple[int, Result] | None:
        """Return the next result with its item's index; None: it is not there yet.

        Raises: what `run` raised, which may be a cancel of its own.
        """
        index = self._next_index if self._ordered else next(iter(self._done), -1)
        task = self._done.pop(index, None)
        if task is None:
            return None
        self._next_index = index + 1
        return index, task.result()

    async def changed(self) -> None:
        """Return when something ended since the last call."""
        await self._changed.wait()
        self._changed.clear()

    async def next(self) -> tuple[int, Result]:
        """Wait for the next result; one must be under way. Raises: what `run` raised."""
        while (taken := self.take()) is None:
            await self.changed()
        return taken

    async def aclose(self) -> None:
        """Cancel what runs, and wait for it."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Result]) -> None:
        # A run that was cancelled from within counts too: without it the order would wait for ever.
        self._done[self._running.pop(task)] = task
        self._changed.set()


_END = object()


async def through(
    window: Window[Item], items: Iterable[Item] | AsyncIterable[Item]
) -> AsyncGenerator[tuple[int, Result]]:
    """Put items through a window, and yield the results as they come; whatever ends this ends what runs.

    Raises: what `items` or the window's `run` raises.
    """
    source = aiter(items) if isinstance(items, AsyncIterable) else _each(items)
    pull: asyncio.Task[Item | object] | None = None
    has_more = True
    try:
        while has_more or not window.is_empty:
            if (taken := window.take()) is not None:
                yield taken
            elif pull is not None and pull.done():
                item, pull = pull.result(), None
                if item is _END:
                    has_more = False
                else:
                    window.start(item)  # type: ignore[arg-type]  # all but the end is an item
            elif has_more and pull is None and not window.is_full:
                pull = asyncio.create_task(_pull(source))
            else:
                await _either(window, pull)
    finally:
        if pull is not None:
            pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)
        await window.aclose()


async def _either(window: Window[Item], pull: asyncio.Task[Item | object] | None) -> None:
    """Return when the source has given something, or a request has ended."""
    changed = asyncio.create_task(window.changed())
    try:
        waiting: set[asyncio.Future[Any]] = {changed, *([pull] if pull else [])}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        changed.cancel()
        await asyncio.gather(changed, return_exceptions=True)


async def _pull(source: AsyncIterator[Item]) -> Item | object:
    return await anext(source, _END)


async def _each(items: Iterable[Item]) -> AsyncIterator[Item]:
    for item in items:
        yield item
