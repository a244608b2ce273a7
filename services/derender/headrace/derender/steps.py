"""The order of a stream's work: short steps on the event loop, long ones on a thread beside it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from headrace.derender.handler import StreamHandler
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Frame, StreamEnd, Tokens

logger = logging.getLogger(__name__)

LONG_STEP_S = 0.005
"""What may take more CPU than this leaves the event loop."""
NUM_THREADS = 2
"""One may be long at work; each more takes the interpreter from the event loop for 5 ms a turn."""
MAX_ENTRIES = 64
"""Entries a step: the messages that it brings about are published at one go."""

StreamKey: TypeAlias = tuple[str, int]
Item: TypeAlias = Tokens | StreamEnd
T = TypeVar("T")


class Steps:
    """Takes what frames hold for streams, and has it worked off: one step of a stream at a time, in order.

    While a long step of one stream is on its thread, what comes for that stream waits, and others go on.
    `feed` gets how much CPU its entries are expected to take, for `run`.
    """

    def __init__(
        self,
        *,
        is_live: Callable[[StreamKey, StreamHandler], bool],
        feed: Callable[[StreamKey, StreamHandler, list[Tokens], float], Awaitable[None]],
        end: Callable[[StreamKey, StreamHandler, StreamEnd], Awaitable[None]],
    ) -> None:
        self._is_live = is_live
        self._feed = feed
        self._end = end
        self._waiting: dict[StreamHandler, deque[Item]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="derender-step")
        self._num_long = 0

    def start(self, group: asyncio.TaskGroup) -> None:
        """Make tasks in this group: an error that nobody expects must end the process, as it does on the loop."""
        self._group = group

    async def run(self, expected_s: float, step: Callable[..., T], *args: object) -> T:
        """Run a step that is expected to take so much CPU, here or on a thread."""
        if expected_s <= LONG_STEP_S:
            return step(*args)
        with self._no_garbage_collection():
            return await asyncio.get_running_loop().run_in_executor(self._threads, step, *args)

    @contextlib.contextmanager
    def _no_garbage_collection(self) -> Iterator[None]:
        """Let no collection look at the many objects of a long step: it would hold up the event loop.

        Nearly all of them are freed by their reference counts when the step ends.
        """
        self._num_long += 1
        gc.disable()
        try:
            yield
        finally:
            self._num_long -= 1
            if not self._num_long:
                gc.enable()

    async def take(self, key: StreamKey, stream: StreamHandler, items: Sequence[Item]) -> None:
        """Work off these items, or return once they stand behind a long step of their stream."""
        waiting = self._waiting.get(stream)
        if waiting is not None:
            waiting.extend(items)
            return
        entries = [item for item in items if isinstance(item, Tokens)]
        is_short = stream.work_off_s(entries) <= LONG_STEP_S
        if is_short and len(entries) == len(items) <= MAX_ENTRIES:  # nearly every time: one entry
            if self._is_live(key, stream):
                await self._feed(key, stream, entries, 0.0)
            return
        queue = deque(items)
        if is_short:
            await self._work_off(key, stream, queue, expected_s=lambda entries: 0.0)
            return
        if self._group is None:
            raise RuntimeError("take() before start()")
        self._waiting[stream] = queue
        task = self._group.create_task(self._work_off_long(key, stream, queue))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_busy(self, stream: StreamHandler) -> bool:
        """Whether a long step of this stream runs, or waits."""
        return stream in self._waiting

    def close(self) -> None:
        """Give up what waits; a step that is on a thread ends there, and nothing comes of it."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _work_off_long(
        self, key: StreamKey, stream: StreamHandler, queue: deque[Item]
    ) -> None:
        try:
            await self._work_off(key, stream, queue, expected_s=stream.work_off_s)
        except BrokerError as error:
            logger.warning("stream not worked off: %s", error, extra={"action": "frame_failed"})
        finally:
            del self._waiting[stream]

    async def _work_off(
        self,
        key: StreamKey,
        stream: StreamHandler,
        queue: deque[Item],
        *,
        expected_s: Callable[[list[Tokens]], float],
    ) -> None:
        turn = Turn()
        while queue and self._is_live(key, stream):
            first = queue.popleft()
            if isinstance(first, StreamEnd):
                await self._end(key, stream, first)
                continue
            entries = [first]
            while queue and len(entries) < MAX_ENTRIES:
                if not isinstance(item := queue[0], Tokens):
                    break
                entries.append(item)
                queue.popleft()
            await self._feed(key, stream, entries, expected_s(entries))
            await turn.give_way()


class Turn:
    """A turn of the event loop, which gives way to the others when it was a long one."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    async def give_way(self) -> None:
        if time.monotonic() - self._started > LONG_STEP_S:
            await asyncio.sleep(0)
            self._started = time.monotonic()


def by_stream(frame: Frame) -> dict[StreamKey, list[Item]]:
    """Return what a frame has for each stream, in order."""
    items: dict[StreamKey, list[Item]] = {}
    for entry in frame.tokens:
        items.setdefault((frame.decode_instance, entry.stream_id), []).append(entry)
    for end in frame.ends:
        items.setdefault((frame.decode_instance, end.stream_id), []).append(end)
    return items
