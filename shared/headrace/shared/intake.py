"""Taking work: by pull, in the order of the lanes, never more than there are free slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.shared.broker import Broker, Delivery, WorkQueue

LINGER_S = 5.0
SHORT_LINGER_S = 0.25
_SWEEP = "sweep"


class Slots:
    """How many more requests fit. A request may use several (one a choice), and so overshoot once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._changed = asyncio.Event()

    def take(self, count: int = 1) -> None:
        """Use slots."""
        self.free -= count

    def give(self, count: int = 1) -> None:
        """Give slots back."""
        self.free += count
        self._changed.set()

    async def changed(self) -> None:
        """Return when slots were given back since the last call."""
        await self._changed.wait()
        self._changed.clear()


class Intake:
    """Takes deliveries from queues in order of priority, and runs `handle` for each as a task.

    `handle` owns the delivery: it acks, naks or terminates it, and lets only errors escape that must end
    the process. `is_open` may close the intake while, say, the KV cache is full. `on_stop` is called once
    nothing more is taken, while what was taken still runs.
    """

    def __init__(
        self,
        broker: Broker,
        queues: Sequence[WorkQueue],
        slots: Slots,
        handle: Callable[[Delivery], Coroutine[Any, Any, None]],
        *,
        is_open: Callable[[], bool] = lambda: True,
        on_stop: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._broker = broker
        self._queues = tuple(queues)
        self._slots = slots
        self._handle = handle
        self._is_open = is_open
        self._on_stop = on_stop
        self._takes: set[asyncio.Task[Delivery | None]] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def run(self, stop: asyncio.Event, *, drain_timeout_s: float | None = None) -> None:
        """Take until `stop` is set, then wait until what was taken is done.

        Raises: whatever `handle` lets escape; what is still running after `drain_timeout_s` is cancelled.
        """
        stopping = asyncio.create_task(stop.wait())
        changed = asyncio.create_task(self._slots.changed())
        try:
            while not stop.is_set():
                self._refill()
                await asyncio.wait(
                    {stopping, changed, *self._takes},
                    timeout=None if self._takes else SHORT_LINGER_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._raise_failure()
                if changed.done():
                    changed = asyncio.create_task(self._slots.changed())
                for take in [take for take in self._takes if take.done()]:
                    self._takes.discard(take)
                    self._start(take)
            await self._end_takes()
            await self._on_stop()
            if self._jobs:
                await asyncio.wait(self._jobs, timeout=drain_timeout_s)
            self._raise_failure()
        finally:
            await _cancel({stopping, changed, *self._takes, *self._jobs})

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refill(self) -> None:
        """Keep one waiting take a queue while there are slots for all of them.

        With fewer slots than queues, a take that waits on a lower lane could hold the slot that a higher
        lane needs; then the queues are asked in turn, and only the first is waited for, shortly.
        """
        if self._slots.free <= 0 or not self._is_open():
            for take in self._takes:
                take.cancel()
            return
        waiting = {take.get_name() for take in self._takes}
        if _SWEEP in waiting:
            return
        if self._slots.free >= len(self._queues):
            for queue in self._queues:
                if queue.consumer not in waiting:
                    self._take(self._broker.take(queue, wait_s=LINGER_S), queue.consumer)
            return
        for take in self._takes:
            take.cancel()
        self._take(self._sweep(), _SWEEP)

    def _take(self, take: Coroutine[Any, Any, Delivery | None], name: str) -> None:
        self._takes.add(asyncio.create_task(take, name=name))

    async def _sweep(self) -> Delivery | None:
        for queue in self._queues:
            delivery = await self._broker.take(queue, wait_s=0)
            if delivery is not None:
                return delivery
        return await self._broker.take(self._queues[0], wait_s=SHORT_LINGER_S)

    def _start(self, take: asyncio.Task[Delivery | None]) -> None:
        if take.cancelled():
            return
        delivery = take.result()
        if delivery is not None:
            self._slots.take()
            job = asyncio.create_task(self._handle(delivery))
            self._jobs.add(job)
            job.add_done_callback(self._finished)

    def _finished(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and job.exception() is not None and self._failure is None:
            self._failure = job.exception()
        self._slots.give()

    async def _end_takes(self) -> None:
        """End the waiting takes; what one of them got in the last moment is worked off."""
        for take in self._takes:
            take.cancel()
        if self._takes:
            await asyncio.wait(self._takes)
        for take in self._takes:
            self._start(take)
        self._takes.clear()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def guarded(main: Coroutine[Any, Any, None], guard: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end while `guard` watches over it; the first error of either ends both."""
    work, watch = asyncio.create_task(main), asyncio.create_task(guard)
    try:
        done, _ = await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await work
    finally:
        await _cancel({work, watch})
