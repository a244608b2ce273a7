"""How many requests are under way, and in which order their results come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from headrace.client import Result
from headrace.client.window import AHEAD, Window, through


class Runs:
    """Requests that end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.num_running = 0
        self.max_running = 0
        self.cancelled: list[int] = []
        self._changed = asyncio.Event()

    async def run(self, item: int) -> Result:
        self.ends[item] = asyncio.get_running_loop().create_future()
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self._changed.set()
        try:
            await self.ends[item]
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        finally:
            self.num_running -= 1
            self._changed.set()
        return Result(request_id=str(item), status="ok", http_status=200, body=b"")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def end(self, item: int) -> None:
        self.ends[item].set_result(None)


@pytest.fixture
def runs() -> Runs:
    return Runs()


async def counted(count: int, read: list[int]) -> AsyncIterator[int]:
    for number in range(count):
        read.append(number)
        yield number


@pytest.mark.parametrize("ordered", [False, True])
async def test_no_more_run_than_may_and_each_has_its_result(runs: Runs, ordered: bool) -> None:
    window = Window(runs.run, concurrency=3, ordered=ordered)
    got: list[int] = []

    async def consume() -> None:
        async for index, result in through(window, range(50)):
            assert result.request_id == str(index)
            got.append(index)

    def waiting() -> list[int]:
        return [item for item, end in runs.ends.items() if not end.done()]

    consuming = asyncio.create_task(consume())
    await runs.until(lambda: runs.num_running == 3)
    for _ in range(50):
        await runs.until(lambda: bool(waiting()))
        runs.end(max(waiting()))  # the latest first
    await consuming
    assert sorted(got) == list(range(50))
    assert not ordered or got == sorted(got)
    assert runs.max_running == 3


async def test_results_that_nobody_takes_hold_up_the_source(runs: Runs) -> None:
    read: list[int] = []
    window = Window(runs.run, concurrency=2, ordered=False)
    async with aclosing(through(window, counted(100, read))) as results:
        first = asyncio.ensure_future(anext(results))
        await runs.until(lambda: len(runs.ends) == 2)
        runs.end(1)
        assert (await first)[0] == 1
        assert len(read) <= 3


async def test_a_result_that_waits_for_an_earlier_one_holds_up_the_source_at_last(
    runs: Runs,
) -> None:
    read: list[int] = []
    window = Window(runs.run, concurrency=2, ordered=True)
    async with aclosing(through(window, counted(100, read))) as results:
        first = asyncio.ensure_future(anext(results))
        for item in range(1, AHEAD * 2):
            await runs.until(lambda item=item: item in runs.ends)  # type: ignore[misc]
            runs.end(item)
        await runs.until(lambda: runs.num_running == 1)
        for _ in range(100):  # time enough to read on
            await asyncio.sleep(0)
        assert len(read) == AHEAD * 2
        runs.end(0)
        assert (await first)[0] == 0


async def test_a_result_does_not_wait_for_a_slow_source(runs: Runs) -> None:
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[int]:
        yield 0
        await go_on.wait()
        yield 1

    window = Window(runs.run, concurrency=8, ordered=False)
    results = through(window, slow())
    first = asyncio.ensure_future(anext(results))
    await runs.until(lambda: 0 in runs.ends)
    runs.end(0)
    assert (await first)[0] == 0
    go_on.set()
    second = asyncio.ensure_future(anext(results))
    await runs.until(lambda: 1 in runs.ends)
    runs.end(1)
    assert (await second)[0] == 1
    with pytest.raises(StopAsyncIteration):
        await anext(results)


async def test_leaving_cancels_what_runs(runs: Runs) -> None:
    window = Window(runs.run, concurrency=3, ordered=False)
    async with aclosing(through(window, range(100))) as results:
        first = asyncio.ensure_future(anext(results))
        await runs.until(lambda: runs.num_running == 3)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert sorted(runs.cancelled) == [0, 1, 2]


async def test_what_a_request_raises_is_raised(runs: Runs) -> None:
    async def fail(item: int) -> Result:
        raise RuntimeError(f"item {item}")

    with pytest.raises(RuntimeError, match="item 0"):
        _ = [pair async for pair in through(Window(fail, concurrency=1, ordered=False), [0, 1])]


async def test_nothing_in_is_nothing_out(runs: Runs) -> None:
    window = Window(runs.run, concurrency=1, ordered=True)
    assert [pair async for pair in through(window, [])] == []


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_run_that_was_cancelled_from_within_ends_the_whole(ordered: bool) -> None:
    """And is not missed by whoever waits for the results in their order."""

    async def run(item: int) -> Result:
        raise asyncio.CancelledError

    async def consume() -> None:
        async for _ in through(Window(run, concurrency=2, ordered=ordered), range(4)):
            raise AssertionError("nothing has a result")

    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await consume()
