"""Readers: gone after a while without a heartbeat, and never because this process was cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.shared.readers import Readers
from headrace.shared.workers import WorkerTable


class Bench:
    """A table of live workers, and a clock."""

    def __init__(self) -> None:
        self.time = 100.0
        self.is_connected = True
        self.alive: set[str] = set()
        self.told: list[str] = []
        self.readers = Readers(
            cast(WorkerTable, self), lambda: self.is_connected, gone_s=30.0, now=lambda: self.time
        )

    def workers(self) -> list[Any]:
        return [SimpleNamespace(instance=instance) for instance in self.alive]

    async def after(self, seconds: int) -> None:
        for _ in range(seconds):
            self.time += 1.0
            await self.readers.check()

    async def tell(self) -> None:
        self.told.append("gone")


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_reader_is_gone_when_nothing_was_heard_of_it_for_a_while(bench: Bench) -> None:
    bench.alive = {"g1"}
    bench.readers.watch("g1", bench.tell)
    await bench.after(100)
    bench.alive = set()
    await bench.after(29)
    assert (bench.told, bench.readers.is_gone("g1")) == ([], False)
    await bench.after(1)
    assert (bench.told, bench.readers.is_gone("g1")) == (["gone"], True)


async def test_whoever_watches_is_told_again_until_the_watch_ends(bench: Bench) -> None:
    unwatch = bench.readers.watch("g1", bench.tell)
    await bench.after(31)
    assert bench.told == ["gone", "gone"]
    unwatch()
    unwatch()
    await bench.after(5)
    assert bench.told == ["gone", "gone"]


async def test_a_reader_that_left_before_its_request_came_is_known_to_be_gone(
    bench: Bench,
) -> None:
    bench.alive = {"g1"}
    await bench.after(10)
    bench.alive = set()
    await bench.after(29)
    assert not bench.readers.is_gone("g1")
    await bench.after(1)
    assert bench.readers.is_gone("g1")


async def test_a_newcomer_judges_nobody_before_it_has_listened_for_long_enough(
    bench: Bench,
) -> None:
    assert not bench.readers.is_gone("never seen")
    await bench.after(30)
    assert bench.readers.is_gone("never seen")


async def test_a_reader_of_whom_nothing_was_heard_yet_may_have_started_a_moment_ago(
    bench: Bench,
) -> None:
    await bench.after(100)
    assert not bench.readers.is_gone("g1")
    await bench.after(29)
    assert not bench.readers.is_gone("g1")
    await bench.after(1)
    assert bench.readers.is_gone("g1")


async def test_time_without_a_broker_does_not_count(bench: Bench) -> None:
    bench.alive = {"g1"}
    await bench.after(1)
    bench.readers.watch("g1", bench.tell)
    bench.alive, bench.is_connected = set(), False
    await bench.after(100)
    assert not bench.readers.is_gone("g1")
    bench.is_connected = True
    await bench.after(29)
    assert bench.told == []
    await bench.after(1)
    assert bench.told == ["gone"]


async def test_a_request_without_a_reader_is_nobodys_to_end(bench: Bench) -> None:
    bench.readers.watch(None, bench.tell)
    await bench.after(100)
    assert (bench.told, bench.readers.is_gone(None)) == ([], False)
