"""A task that comes again while it is computed: dropped if it was answered, else computed after all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.prefill.copies import Copies
from headrace.shared.intake import Slots

WATCHDOG_S = 10.0


class Delivery:
    """Counts who keeps it alive."""

    def __init__(self) -> None:
        self.num_alive = 0

    @contextlib.asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[None]:
        self.num_alive += 1
        yield
        self.num_alive -= 1


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_copy_is_needed_only_if_the_first_one_brought_no_answer(is_answered: bool) -> None:
    slots, delivery = Slots(2), Delivery()
    copies = Copies(slots)
    slots.take(2)
    with copies.under_way("t") as has_answer:
        copy = asyncio.create_task(copies.is_answered("t", delivery))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert (slots.free, delivery.num_alive) == (1, 1)  # it waits, and takes nobody's place
        if is_answered:
            has_answer.set_result(True)
    async with asyncio.timeout(WATCHDOG_S):
        assert await copy is is_answered
    assert (slots.free, delivery.num_alive) == (0, 0)


async def test_of_two_copies_one_is_computed_and_the_other_waits_for_it() -> None:
    copies, order = Copies(Slots(3)), []

    async def copy(delivery: Any) -> None:
        if await copies.is_answered("t", delivery):
            order.append("dropped")
            return
        with copies.under_way("t") as has_answer:
            order.append("computed")
            await asyncio.sleep(0)
            has_answer.set_result(True)

    async with asyncio.timeout(WATCHDOG_S), asyncio.TaskGroup() as group:
        with copies.under_way("t"):
            group.create_task(copy(Delivery()))
            group.create_task(copy(Delivery()))
            await asyncio.sleep(0)
    assert order == ["computed", "dropped"]
