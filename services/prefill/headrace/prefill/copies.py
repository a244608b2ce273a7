"""Copies of a task that is computed here already: each waits for its end, and is worked on if it brought nothing.

Decode publishes a task again when it was away from the broker. Whoever computes it may just be giving it up, because
nobody seemed to wait; a copy that was dropped in that moment would leave decode waiting for its timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.shared.broker import Delivery
from headrace.shared.intake import Slots


class Copies:
    """The tasks under way on this worker, by ID."""

    def __init__(self, slots: Slots) -> None:
        """A copy that waits needs none of the `slots`, and has given its own away meanwhile."""
        self._slots = slots
        self._under_way: dict[str, asyncio.Future[bool]] = {}

    @contextmanager
    def under_way(self, task_id: str) -> Iterator[asyncio.Future[bool]]:
        """Compute a task while the block runs; it completes what it gets once decode has the answer."""
        has_answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._under_way[task_id] = has_answer
        try:
            yield has_answer
        finally:
            del self._under_way[task_id]
            if not has_answer.done():
                has_answer.set_result(False)

    async def is_answered(self, task_id: str, delivery: Delivery) -> bool:
        """Wait while the task is under way; True: decode has its answer. False: it is to be computed now."""
        while (has_answer := self._under_way.get(task_id)) is not None:
            self._slots.give()
            try:
                async with delivery.keep_alive():
                    if await asyncio.shield(has_answer):
                        return True
            finally:
                self._slots.take()
        return False
