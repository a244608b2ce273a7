"""Which models are served, and how much of them there is: as far as the broker lets this user hear of it.

Without it a request for a model that nobody serves would wait for its deadline, which is a day.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from headrace.shared.errors import ModelNotFoundError
from headrace.shared.subjects import Role, model_slug
from headrace.shared.workers import WorkerTable

HEARD_WITHIN_S = 5.0  # workers beat every two seconds, and at once on a roll call
CONCURRENCY_PER_SLOT = 2  # so that one is rendered for each that is decoded
DEFAULT_CONCURRENCY = 32


class Models:
    """The models that were heard of since the start: one that is restarted is not forgotten."""

    def __init__(self, table: WorkerTable, heard_within_s: float = HEARD_WITHIN_S) -> None:
        self._table = table
        self._heard_within_s = heard_within_s
        self._slugs: set[str] = set()
        self._waiting: dict[str, asyncio.Task[None]] = {}  # slug → the one wait that it is worth

    async def listen(self) -> bool:
        """Wait a moment for the first heartbeat; return whether one came."""
        await self._wait(lambda _: bool(self._served()) and bool(self.num_slots))
        return bool(self._served())

    @property
    def only(self) -> str | None:
        """The one model that is served. None: there are several, or none was heard of."""
        served = self._served()
        return served[0] if len(served) == 1 else None

    @property
    def num_slots(self) -> int:
        """How many sequences the decode workers run at once."""
        return sum(beat.slots for beat in self._table.ready(Role.DECODE))

    @property
    def concurrency(self) -> int:
        """How many requests under way keep the decode workers busy."""
        return CONCURRENCY_PER_SLOT * self.num_slots or DEFAULT_CONCURRENCY

    async def check(self, model: str) -> None:
        """Raises: ModelNotFoundError when others are served and this one is not."""
        slug = model_slug(model)
        if self._is_served(slug):
            return
        wait = self._waiting.get(slug)
        if wait is None:
            wait = asyncio.create_task(self._wait(lambda _: self._is_served(slug)))
            self._waiting[slug] = wait
        await asyncio.shield(wait)
        if self._slugs and not self._is_served(slug):
            names = ", ".join(self._served())
            raise ModelNotFoundError(
                f"The model `{model}` does not exist. Served: {names}", param="model"
            )

    def _is_served(self, slug: str) -> bool:
        self._slugs.update(model_slug(name) for name in self._served())
        return slug in self._slugs

    def _served(self) -> list[str]:
        return sorted(name for name in self._table.models() if name)  # a gateway serves every model

    async def _wait(self, predicate: Callable[[WorkerTable], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heard_within_s):
                await self._table.wait_for(predicate)
