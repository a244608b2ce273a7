"""Taking work: by pull, in the order of the lanes, never more than there are free slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.shared.broker import Broker, Delivery, WorkQueue

LINGER_S = 5.0
SHORT_LINGER_S = 0.25
_SWEEP = "sweep"
_LAST_RESORT = "last resort"


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

    def notify(self) -> None:
        """Wake who waits for a change, for another reason."""
        self._changed.set()

    async def changed(self) -> None:
        """Return when slots were given back since the last call, or somebody notified."""
        await self._changed.wait()
        self._changed.clear()


class Preemption(Protocol):
    """Makes room for what is urgent."""

    def is_possible(self) -> bool:
        """Whether something runs that may be given back."""
        ...

    def preempt(self) -> None:
        """Give something back, if that is possible still; its slots come free a moment later."""
        ...


class Intake:
    """Takes deliveries from queues in order of priority, and runs `handle` for each as a task.

    `handle` owns the delivery: it acks, naks or terminates it, and lets only errors escape that must end
    the process. `is_open` may close the intake while, say, the KV cache is full. `on_stop` is called once
    nothing more is taken, while what was taken still runs. With a `preemption`, the first queue is also
    taken from while no slot is free.
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
        preemption: Preemption | None = None,
    ) -> None:
        self._broker = broker
        self._queues = tuple(queues)
        self._slots = slots
        self._handle = handle
        self._is_open = is_open
        self._on_stop = on_stop
        self._preemption = preemption
        self._empty: set[str] = set()  # consumers whose last take got nothing
        self._lingering: set[str] = set()  # those whose last take waits, or waited
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
                    timeout=None if self._takes and self._slots.free > 0 else SHORT_LINGER_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._raise_failure()
                if changed.done():
                    changed = asyncio.create_task(self._slots.changed())
                for take in [take for take in self._takes if take.done()]:
                    self._takes.discard(take)
                    self._start(take)
                await asyncio.sleep(0)  # what was taken goes its way before more is asked for
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
        """Keep as many takes waiting as there are slots for, the higher lanes first."""
        if not self._is_open() or self._slots.free <= 0:
            self._only_urgent()
        elif self._slots.free >= len(self._queues):
            self._one_a_queue()
        else:
            self._one_in_all()

    def _one_a_queue(self) -> None:
        """Keep a take waiting on each queue, but on a lower lane only while the higher ones are empty.

        A queue that has just given something may have more: it is asked again, before a lower one is. Where takes
        wait on all lower ones, there is nothing to find out first, and the take just waits.
        """
        self._keep_only({queue.consumer for queue in self._queues} | {_SWEEP})
        waiting = {take.get_name() for take in self._takes}
        if _SWEEP in waiting:
            return
        for number, queue in enumerate(self._queues, 1):
            name = queue.consumer
            lingers = name in self._empty
            if name in waiting:
                lingers = lingers or name in self._lingering  # it has given nothing since
            else:
                lingers = lingers or all(q.consumer in waiting for q in self._queues[number:])
                self._take(self._broker.take(queue, wait_s=LINGER_S if lingers else 0), name)
                (self._lingering.add if lingers else self._lingering.discard)(name)
            if not lingers:
                return

    def _one_in_all(self) -> None:
        """With fewer slots than queues, ask the queues in turn, and wait for the first one only, shortly.

        A take that waits on a lower lane could hold the slot that a higher lane needs.
        """
        self._keep_only({_SWEEP})
        self._empty.clear()
        if not self._takes:
            self._take(self._sweep(), _SWEEP)

    def _only_urgent(self) -> None:
        """Without a slot, wait for what something that runs would be given back for, behind all other workers."""
        may_preempt = (
            self._is_open() and self._preemption is not None and self._preemption.is_possible()
        )
        self._keep_only({_LAST_RESORT} if may_preempt else set())
        self._empty.clear()
        if may_preempt and not self._takes:
            take = self._broker.take(self._queues[0], wait_s=LINGER_S, is_last_resort=True)
            self._take(take, _LAST_RESORT)

    def _keep_only(self, names: Set[str]) -> None:
        """Withdraw the takes that wait for something else; what one of them got already is worked off."""
        for take in [take for take in self._takes if take.get_name() not in names]:
            take.cancel()

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
        if delivery is None:
            self._empty.add(take.get_name())
            return
        self._empty.discard(take.get_name())
        is_urgent = take.get_name() in (_LAST_RESORT, self._queues[0].consumer)
        if is_urgent and self._slots.free <= 0 and self._preemption is not None:
            self._preemption.preempt()  # what is less urgent overshoots: it might be back at once
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


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their end; the first error cancels the rest, waits for them, and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
