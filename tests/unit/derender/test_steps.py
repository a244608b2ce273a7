"""Long steps run beside the event loop, and nothing that they make holds it up."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from headrace.derender.steps import LONG_STEP_S, Steps

LONG_S = 2 * LONG_STEP_S


async def nothing(*_: object) -> None:
    """What this test's steps bring about."""


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps(is_live=lambda *_: True, feed=nothing, end=nothing)
    yield steps
    steps.close()


async def test_a_long_step_runs_on_a_thread_and_a_short_one_here(steps: Steps) -> None:
    here = threading.get_ident()
    assert await steps.run(0.0, threading.get_ident) == here
    assert await steps.run(LONG_S, threading.get_ident) != here


async def test_no_garbage_is_collected_while_any_long_step_runs(steps: Steps) -> None:
    begun = [threading.Event(), threading.Event()]
    go_on = [threading.Event(), threading.Event()]

    def step(number: int) -> bool:
        begun[number].set()
        go_on[number].wait()
        return gc.isenabled()

    first, second = (asyncio.create_task(steps.run(LONG_S, step, n)) for n in range(2))
    for event in begun:
        await asyncio.to_thread(event.wait)
    go_on[0].set()
    assert not await first
    assert not gc.isenabled()
    go_on[1].set()
    assert not await second
    assert gc.isenabled()


async def test_garbage_is_collected_again_after_a_step_that_failed(steps: Steps) -> None:
    def step() -> None:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        await steps.run(LONG_S, step)
    assert gc.isenabled()
