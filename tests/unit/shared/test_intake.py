"""The intake: by priority, never beyond the free slots, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from headrace.shared.broker import Broker, Delivery, WorkQueue
from headrace.shared.intake import Intake, Slots
from headrace.shared.subjects import Lane

QUEUES = [WorkQueue.job("m", lane) for lane in Lane]


class Queues:
    """Work queues in memory; counts the takes that wait."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[asyncio.Future[Any]]] = {q.consumer: [] for q in QUEUES}
        self.jobs: dict[str, list[Any]] = {q.consumer: [] for q in QUEUES}
        self.changed = asyncio.Condition()
        self.last_resorts = 0  # of those that wait
        self.num_looks = 0  # takes that did not wait

    @property
    def num_waiting(self) -> int:
        return sum(len(takes) for takes in self.waiting.values())

    async def take(self, queue: WorkQueue, *, wait_s: float, is_last_resort: bool = False) -> Any:
        self.num_looks += not wait_s
        if self.jobs[queue.consumer]:
            return self.jobs[queue.consumer].pop(0)
        if not wait_s:
            return None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting[queue.consumer].append(future)
        self.last_resorts += is_last_resort
        await self._tell()
        try:
            return await future
        finally:
            self.waiting[queue.consumer].remove(future)
            self.last_resorts -= is_last_resort
            await self._tell()

    def put(self, lane: Lane, job: Any) -> None:
        consumer = WorkQueue.job("m", lane).consumer
        for future in self.waiting[consumer]:
            if not future.done():
                future.set_result(job)
                return
        self.jobs[consumer].append(job)

    def end_lingers(self, *lanes: Lane) -> None:
        """Let every take that waits on these lanes, or on all, end with nothing."""
        for lane in lanes or Lane:
            for future in list(self.waiting[WorkQueue.job("m", lane).consumer]):
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Bench:
    """An intake whose jobs run until the test ends them."""

    def __init__(self, num_slots: int) -> None:
        self.queues = Queues()
        self.victims: list[Any] = []  # jobs that may be preempted, the first one first
        self.slots = Slots(num_slots)
        self.is_open = True
        self.running: dict[Any, asyncio.Event] = {}
        self.stop = asyncio.Event()
        self.stopped: list[int] = []
        self.intake = Intake(
            cast(Broker, self.queues),
            QUEUES,
            self.slots,
            self._handle,
            is_open=lambda: self.is_open,
            on_stop=self._on_stop,
            preemption=self,
        )
        self.task = asyncio.create_task(self.intake.run(self.stop))

    def is_possible(self) -> bool:
        return bool(self.victims)

    def preempt(self) -> None:
        if self.victims:
            self.running[self.victims.pop(0)].set()

    async def _handle(self, delivery: Delivery) -> None:
        if isinstance(delivery, Exception):
            raise delivery
        self.running[delivery] = asyncio.Event()
        await self.queues._tell()
        await self.running[delivery].wait()
        del self.running[delivery]
        await self.queues._tell()

    async def _on_stop(self) -> None:
        self.stopped.append(len(self.running))
        await self.queues._tell()


@pytest.fixture
async def bench(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    bench = Bench(request.param)
    yield bench
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)


@pytest.mark.parametrize("bench", [4], indirect=True)
async def test_with_room_one_take_waits_on_each_queue(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.put(Lane.BULK, "b")
    await bench.queues.until(lambda: "b" in bench.running and bench.queues.num_waiting == 3)


@pytest.mark.parametrize("bench", [8], indirect=True)
async def test_where_all_lower_lanes_are_waited_for_nothing_is_looked_at_before_the_next_wait(
    bench: Bench,
) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    num_looks = bench.queues.num_looks
    for job in ("r", "r2"):
        bench.queues.put(Lane.RT, job)
        await bench.queues.until(lambda job=job: job in bench.running)
        await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    assert bench.queues.num_looks == num_looks


@pytest.mark.parametrize("bench", [8], indirect=True)
async def test_a_lower_lane_is_waited_for_again_while_a_higher_one_gives_nothing(
    bench: Bench,
) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.put(Lane.RT, "r")
    await bench.queues.until(lambda: "r" in bench.running and bench.queues.num_waiting == 3)
    bench.queues.end_lingers(Lane.STD, Lane.BULK)
    async with asyncio.timeout(20):
        await bench.queues.until(lambda: bench.queues.num_waiting == 1)
        await bench.queues.until(lambda: bench.queues.num_waiting == 3)


@pytest.mark.parametrize("bench", [8], indirect=True)
async def test_a_lower_lane_is_not_waited_for_again_before_a_higher_one_was_asked(
    bench: Bench,
) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.end_lingers(Lane.BULK)
    bench.queues.put(Lane.RT, "r")
    bench.queues.put(Lane.RT, "r2")
    num_looks = bench.queues.num_looks
    async with asyncio.timeout(20):
        await bench.queues.until(
            lambda: {"r", "r2"} <= set(bench.running) and bench.queues.num_waiting == 3
        )
    assert bench.queues.num_looks > num_looks


@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_with_fewer_slots_than_queues_only_the_first_is_waited_for(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.put(Lane.BULK, "b")
    await bench.queues.until(lambda: "b" in bench.running and bench.queues.num_waiting == 1)
    assert [len(takes) for takes in bench.queues.waiting.values()] == [1, 0, 0]


@pytest.mark.parametrize("bench", [1], indirect=True)
async def test_the_higher_lane_comes_first(bench: Bench) -> None:
    bench.queues.put(Lane.BULK, "b")
    bench.queues.put(Lane.RT, "r")
    await bench.queues.until(lambda: bool(bench.running))
    assert list(bench.running) == ["r"]


@pytest.mark.parametrize("bench", [4], indirect=True)
async def test_a_job_of_many_choices_withdraws_the_takes_that_it_leaves_no_slot_for(
    bench: Bench,
) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.put(Lane.STD, "n=8")
    await bench.queues.until(lambda: "n=8" in bench.running)
    bench.slots.take(7)
    bench.slots.give(0)
    await bench.queues.until(lambda: bench.queues.num_waiting == 0)
    bench.slots.give(7)
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)


@pytest.mark.parametrize("bench", [4], indirect=True)
async def test_stop_takes_nothing_more_and_finishes_what_runs(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.put(Lane.RT, "r")
    await bench.queues.until(lambda: "r" in bench.running)
    bench.stop.set()
    await bench.queues.until(lambda: bench.stopped == [1])
    assert (bench.queues.num_waiting, bench.task.done()) == (0, False)
    bench.running["r"].set()
    await bench.task


@pytest.mark.parametrize("bench", [4], indirect=True)
async def test_an_error_that_a_job_lets_escape_ends_the_intake(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.queues.put(Lane.RT, ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        await bench.task
    assert bench.queues.num_waiting == 0


@pytest.mark.parametrize("bench", [6], indirect=True)
async def test_a_lower_lane_gets_no_slot_while_a_higher_one_has_work(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    for number in range(4):
        bench.queues.put(Lane.RT, f"r{number}")
    for number in range(9):
        bench.queues.put(Lane.BULK, f"b{number}")
    await bench.queues.until(lambda: len(bench.running) == 6)
    # One take waited on each queue: so one of `bulk` came at once, and one took the slot that was left.
    assert sorted(bench.running) == ["b0", "b1", "r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("bench", [4], indirect=True)
async def test_with_slots_free_again_the_queues_are_asked_in_order(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    for number in range(4):
        bench.queues.put(Lane.BULK, f"b{number}")
    await bench.queues.until(lambda: len(bench.running) == 4)
    bench.queues.put(Lane.BULK, "later")
    for number in range(3):
        bench.queues.put(Lane.RT, f"r{number}")
    for number in range(3):
        bench.running[f"b{number}"].set()
    await bench.queues.until(lambda: {"r0", "r1", "r2"} <= set(bench.running))
    assert "later" not in bench.running


@pytest.mark.parametrize("bench", [1], indirect=True)
async def test_without_a_slot_the_first_queue_is_waited_for_where_something_can_be_preempted(
    bench: Bench,
) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 1)
    bench.victims.append("b")
    bench.queues.put(Lane.BULK, "b")
    bench.queues.end_lingers()
    await bench.queues.until(lambda: bench.queues.last_resorts == 1)
    assert [len(takes) for takes in bench.queues.waiting.values()] == [1, 0, 0]
    bench.queues.put(Lane.STD, "s")
    bench.queues.put(Lane.RT, "r")
    await bench.queues.until(lambda: list(bench.running) == ["r"])
    assert bench.queues.jobs[WorkQueue.job("m", Lane.STD).consumer] == ["s"]
    assert bench.queues.num_waiting == 0  # nothing is left that could be preempted
    bench.running["r"].set()
    await bench.queues.until(lambda: list(bench.running) == ["s"])


@pytest.mark.parametrize("bench", [4], indirect=True)
async def test_what_is_not_urgent_takes_no_slot_of_what_runs(bench: Bench) -> None:
    await bench.queues.until(lambda: bench.queues.num_waiting == 3)
    bench.victims.append("n=4")
    bench.running["n=4"] = asyncio.Event()
    bench.slots.take(4)
    bench.queues.put(Lane.BULK, "b")
    await bench.queues.until(lambda: "b" in bench.running)
    assert bench.victims == ["n=4"]
