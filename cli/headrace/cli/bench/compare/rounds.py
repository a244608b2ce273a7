"""Several starts of each setup as one: what they gave on average, and how far one start is from another.

Resampling the requests of one run tells how much chance there is in them, and nothing of what a start brings with
it: where memory came to lie, what else the machine did. How much that is, all setups and rates tell together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, variance
from typing import Any

from headrace.cli.bench.compare.points import Sweep


def merged(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Return the sweeps with one point a rate, its values the means over the rounds, its errors those of the means."""
    spread = _spread(sweeps)
    return [
        replace(sweep, points=[_merged(some, spread) for some in _by_rate(sweep)])
        for sweep in sweeps
    ]


def _by_rate(sweep: Sweep) -> list[list[dict[str, Any]]]:
    rates = sorted({point["rate"] for point in sweep.points})
    return [[point for point in sweep.points if point["rate"] == rate] for rate in rates]


def _spread(sweeps: Iterable[Sweep]) -> dict[str, float]:
    """Return how far one start is from another, as a part of the mean (a standard deviation), of each measure."""
    found: dict[str, list[float]] = {}
    for rounds in (some for sweep in sweeps for some in _by_rate(sweep)):
        for name in rounds[0]["compared"]:
            values = _values(rounds, name)
            if len(values) > 1 and fmean(values) > 0:
                found.setdefault(name, []).append(variance(values) / fmean(values) ** 2)
    return {name: math.sqrt(fmean(relative)) for name, relative in found.items()}


def _merged(rounds: list[dict[str, Any]], spread: dict[str, float]) -> dict[str, Any]:
    compared: dict[str, dict[str, float] | None] = {}
    for name in rounds[0]["compared"]:
        known = [one for point in rounds if (one := point["compared"][name]) is not None]
        if not known:
            compared[name] = None
            continue
        value = fmean(one["value"] for one in known)
        by_chance = math.hypot(*(one["error"] for one in known)) / len(known)
        by_start = value * spread.get(name, 0.0) / math.sqrt(len(known))
        compared[name] = {"value": value, "error": max(by_chance, by_start)}
    mean: dict[str, Any] = _mean(rounds)
    return mean | {
        "compared": compared,
        "num_rounds": len(rounds),
        "num_errors": sum(point["num_errors"] for point in rounds),
    }


def _values(rounds: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [one["value"] for point in rounds if (one := point["compared"][name]) is not None]


def _mean(values: Sequence[Any]) -> Any:
    """Return the means of equal tables; what is no number is that of the first one."""
    first = values[0]
    if isinstance(first, dict):
        return {
            name: _mean([value[name] for value in values if value and name in value])
            for name in first
        }
    if isinstance(first, int | float) and all(isinstance(value, int | float) for value in values):
        return fmean(values)
    return first
