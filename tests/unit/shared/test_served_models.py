"""Which models a batch may ask, and how many requests keep them busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.shared.errors import ModelNotFoundError
from headrace.shared.messages import Heartbeat
from headrace.shared.served_models import DEFAULT_CONCURRENCY, Models
from headrace.shared.subjects import Role


class Table:
    """What was heard of the workers."""

    def __init__(self, *models: str) -> None:
        self.served = list(models)

    def models(self) -> dict[str, list[Heartbeat]]:
        return {name: [] for name in ["", *self.served]}  # "": a gateway

    def ready(self, role: Role) -> list[Heartbeat]:
        assert role is Role.DECODE
        return [
            Heartbeat(
                role=role,
                instance=name,
                model=name,
                contract="",
                state="ready",
                slots=8,
                num_running=0,
            )
            for name in self.served
        ]

    async def wait_for(self, predicate: Callable[[Any], bool]) -> None:
        if not predicate(self):
            await asyncio.Event().wait()


def models(table: Table) -> Models:
    return Models(table, heard_within_s=0.0)  # type: ignore[arg-type]  # as much of one as is asked


async def test_the_one_model_that_is_served_is_the_default_and_its_slots_say_how_many() -> None:
    assert await models(Table("m")).listen()
    assert (models(Table("m")).only, models(Table("m")).concurrency) == ("m", 16)
    assert (models(Table("a", "b")).only, models(Table("a", "b")).concurrency) == (None, 32)


async def test_who_hears_of_nobody_judges_nobody() -> None:
    deaf = models(Table())
    assert not await deaf.listen()
    assert (deaf.only, deaf.concurrency) == (None, DEFAULT_CONCURRENCY)
    await deaf.check("m")


async def test_a_model_that_is_not_among_those_that_are_served_is_refused_by_name() -> None:
    with pytest.raises(ModelNotFoundError, match=r"`x` does not exist. Served: a, b"):
        await models(Table("a", "b")).check("x")


async def test_a_model_whose_workers_are_away_for_a_while_stays_known() -> None:
    table = Table("a", "b")
    known = models(table)
    await known.check("a")
    table.served.remove("a")
    await known.check("a")
    table.served.append("c")
    await known.check("c")
