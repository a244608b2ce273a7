"""An alarm wakes at its time or earlier, never later, and moves no timer to put it off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.shared.alarm import Alarm


class Timer:
    def __init__(self, when: float, ring: Callable[[], None]) -> None:
        self._when = when
        self.ring = ring
        self.is_cancelled = False

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    """The timers that were set, which the test lets go off."""
    made: list[Timer] = []

    def call_at(when: float, ring: Callable[[], None], *args: Any, **more: Any) -> Timer:
        made.append(Timer(when, ring))
        return made[-1]

    monkeypatch.setattr(asyncio.get_running_loop(), "call_at", call_at)
    return made


async def test_to_put_it_off_sets_no_timer(timers: list[Timer]) -> None:
    wake = asyncio.Event()
    alarm = Alarm(wake)
    for when in (10.0, 11.0, 12.0):
        alarm.set(when)
    assert [timer.when() for timer in timers] == [10.0]
    timers[0].ring()
    assert wake.is_set()
    alarm.set(12.0)
    assert [timer.when() for timer in timers] == [10.0, 12.0]


async def test_an_earlier_time_is_kept(timers: list[Timer]) -> None:
    alarm = Alarm(asyncio.Event())
    alarm.set(10.0)
    alarm.set(5.0)
    assert [(timer.when(), timer.is_cancelled) for timer in timers] == [(10.0, True), (5.0, False)]


async def test_a_cancelled_one_wakes_nobody(timers: list[Timer]) -> None:
    alarm = Alarm(asyncio.Event())
    alarm.set(10.0)
    alarm.cancel()
    assert timers[0].is_cancelled
