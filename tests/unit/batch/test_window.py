"""How many lines of a batch are under way."""

from __future__ import annotations

import asyncio

from headrace.batch.window import FIRST, Window
from headrace.shared.messages import Timings

QUICK = Timings(total_s=1.0, render_queue_s=0.0, decode_queue_s=0.1)
LATE = Timings(total_s=10.0, render_queue_s=0.5, decode_queue_s=9.0)


async def full(window: Window) -> Window:
    """Open as many as the window lets."""
    while window.num_open < window.size:
        await window.enter()
    return window


async def end(window: Window, timings: Timings) -> None:
    window.leave()
    window.ended(timings)
    await full(window)


async def test_it_grows_while_nothing_waits_up_to_its_limit() -> None:
    window = await full(Window(lambda: 32))
    for _ in range(100):
        await end(window, QUICK)
    assert window.size == 32


async def test_it_stays_where_it_is_while_it_is_not_used() -> None:
    window = Window(lambda: 32)
    await window.enter()
    for _ in range(100):
        window.ended(QUICK)
    assert window.size == FIRST


async def test_what_waited_long_halves_it_once_for_all_that_was_under_way() -> None:
    window = await full(Window(lambda: 64, first=32))
    for _ in range(16):
        await end(window, LATE)
    assert window.size == 16
    for _ in range(20):
        await end(window, LATE)
    assert window.size == 8


async def test_a_full_queue_halves_it() -> None:
    window = await full(Window(lambda: 64, first=32))
    window.refused()
    assert window.size == 16


async def test_it_never_closes() -> None:
    window = await full(Window(lambda: 0))
    for _ in range(50):
        window.refused()
        await end(window, LATE)
    assert window.size == 1


async def test_one_more_begins_when_one_has_ended() -> None:
    window = Window(lambda: 1)
    await window.enter()
    entering = asyncio.create_task(window.enter())
    await asyncio.sleep(0)
    assert not entering.done()
    window.leave()
    await entering


def test_a_wait_in_proportion_to_the_work_is_no_queue() -> None:
    window = Window(lambda: 64, first=32)
    window.ended(Timings(total_s=30.0, decode_queue_s=15.0))
    assert window.size == 32
