"""What is noticed of an engine that is there and does nothing. Counted in looks at it, not in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headrace.engine.fake_engine import FakeDecodeEngine
from headrace.engine.interface import EngineStats, watch_engine
from headrace.shared.errors import EngineDeadError, EngineStuckError
from headrace.shared.settings import FakeSettings, Settings

TICK_S = 0.001
STUCK_S = 3 * TICK_S


class Watched(FakeDecodeEngine):
    """An engine whose statistics the test writes, one for each look."""

    def __init__(self, *looks: tuple[int, int]) -> None:
        super().__init__(Settings(fake=FakeSettings(step_s=0.0)))
        self.num_looks = 0
        self._looks: Iterator[tuple[int, int]] = iter(looks)

    def stats(self) -> EngineStats:
        try:
            num_running, num_steps = next(self._looks)
        except StopIteration:
            self.die()
            return EngineStats()
        self.num_looks += 1
        return EngineStats(num_running=num_running, num_steps=num_steps)


async def watch(engine: Watched) -> list[str]:
    """Watch to the end; return what was told, which comes before the error."""
    told: list[str] = []

    async def on_dead() -> None:
        told.append("dead")

    await engine.start()
    try:
        await watch_engine(engine, stuck_s=STUCK_S, on_dead=on_dead, interval_s=TICK_S)
    except EngineDeadError as error:
        told.append(type(error).__name__)
    finally:
        await engine.shutdown()
    return told


async def test_requests_without_a_step_are_a_stuck_engine() -> None:
    engine = Watched(*[(1, 7)] * 20)
    assert await watch(engine) == ["dead", EngineStuckError.__name__]
    assert engine.num_looks == 4  # the first finds 7 steps, the next three find no more


async def test_an_engine_that_steps_is_not_stuck() -> None:
    assert await watch(Watched(*[(2, step) for step in range(20)])) == [
        "dead",
        EngineDeadError.__name__,
    ]


async def test_an_engine_that_rests_is_not_stuck() -> None:
    assert await watch(Watched(*[(0, 7)] * 20)) == ["dead", EngineDeadError.__name__]


async def test_the_time_of_a_rest_does_not_count() -> None:
    looks = [(0, 7)] * 10 + [(1, 7)] * 2 + [(1, 8)] * 2
    assert await watch(Watched(*looks)) == ["dead", EngineDeadError.__name__]


@pytest.mark.parametrize("stall", [True, False])
async def test_the_fake_steps_while_it_waits_for_a_pull_and_not_when_it_is_stalled(
    stall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.fake_base.IDLE_STEP_S", 0.0)
    engine = FakeDecodeEngine(Settings())
    await engine.start()
    engine.faults.stall = stall
    waiting = asyncio.create_task(engine._stepping(asyncio.Event().wait()))
    if stall:
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().num_steps == 0
    else:
        await engine.wait_until(lambda stats: stats.num_steps >= 3)
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await waiting
