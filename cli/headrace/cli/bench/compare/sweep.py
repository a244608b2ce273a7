"""The same load on each setup, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.bench.compare.points import Sweep, point
from headrace.cli.bench.compare.server import NotStartedError
from headrace.cli.bench.compare.setups import Setup
from headrace.cli.bench.prompts import Ask
from headrace.cli.bench.run import BenchError, Load, send

Start = Callable[[Setup], AbstractAsyncContextManager[str]]
"""Gives the address of a setup that runs. Raises: NotStartedError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What every setup is sent: at each rate its own conversations, so that no cache holds one from before."""

    asks: dict[float, list[Ask]]  #: by rate
    warmup: Sequence[Ask] = ()
    seed: int = 0  #: of the times
    limits_ms: dict[str, float] = field(default_factory=dict)  #: of goodput
    num_rounds: int = 1  #: in each, every setup is started once


async def sweep(
    setups: Sequence[Setup], plan: Plan, start: Start, report: Callable[[str], None]
) -> AsyncIterator[list[Sweep]]:
    """Yield all that is known after each start. A setup that does not start is left out from then on, and says why."""
    done = [Sweep(name=one.name, title=one.title, is_tuned=one.is_tuned) for one in setups]
    for _ in range(plan.num_rounds):
        for setup, found in zip(setups, done, strict=True):
            await _measure(setup, found, plan, start, report)
            yield done


async def _measure(
    setup: Setup, found: Sweep, plan: Plan, start: Start, report: Callable[[str], None]
) -> None:
    """Add the points of one start."""
    if found.skipped:
        return  # it is no better a second time
    found.skipped = setup.cannot
    if not setup.cannot:
        report(f"{setup.title}: starting")
        try:
            async with start(setup) as url:
                async for one in _points(url, plan):
                    found.points.append(one)
                    report(f"{setup.title}: {_line(one)}")
        except (NotStartedError, BenchError) as error:
            found.skipped = str(error)
    if found.skipped:
        report(f"{setup.title}: not measured: {found.skipped}")


async def _points(url: str, plan: Plan) -> AsyncIterator[dict[str, Any]]:
    warmup = plan.warmup
    for rate, asks in plan.asks.items():
        _, measured = await send(url, Load(asks=asks, rate=rate, seed=plan.seed, warmup=warmup))
        yield point(rate, measured, plan.limits_ms)
        warmup = ()


def _line(one: dict[str, Any]) -> str:
    compared = {name: value or {"value": 0.0} for name, value in one["compared"].items()}
    return (
        f"{one['rate']:g} requests/s, {one['num_requests']} requests, {one['num_errors']} failed: "
        f"goodput {compared['goodput_per_s']['value']:.2f}/s, "
        f"TTFT p50 {compared['ttft_p50_ms']['value']:.1f} ms, "
        f"ITL p99 {compared['itl_p99_ms']['value']:.1f} ms"
    )
