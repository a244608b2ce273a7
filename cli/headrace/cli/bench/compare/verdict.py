"""Which setup wins where, in plain words; what differs no more than by chance is level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from headrace.cli.bench.compare.points import Sweep

ERRORS = 2.0
"""How many standard errors two values must be apart to differ: more than 19 of 20 times that is no chance."""
SMALLEST = 0.02
"""Nor is a smaller difference than this part of the better one worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """What is compared."""

    key: str  #: in a point's `compared`
    title: str
    unit: str
    is_higher_better: bool = False


MEASURES = (
    Measure(key="goodput_per_s", title="Goodput", unit="good requests/s", is_higher_better=True),
    Measure(key="itl_p99_ms", title="p99 ITL", unit="ms"),
    Measure(key="ttft_p50_ms", title="Median TTFT", unit="ms"),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """Who is best at one rate by one measure."""

    rate: float
    best: tuple[str, ...]  #: titles, the best first, those level with it behind
    value: float  #: of the first
    next: tuple[str, float] | None  #: the best of those that are worse; None: there is none


def verdict(sweeps: Sequence[Sweep]) -> list[str]:
    """Return a sentence a measure; none of fewer than two setups."""
    measured = [sweep for sweep in sweeps if sweep.points]
    if len(measured) < 2:
        return []
    sentences = []
    for measure in MEASURES:
        standings = [
            standing
            for rate in sorted({p["rate"] for sweep in measured for p in sweep.points})
            if (standing := stand(measured, rate, measure)) is not None
        ]
        parts = [_part(list(group), measure) for _, group in groupby(standings, _winners)]
        if parts:
            sentences.append(f"{measure.title}: {'; '.join(parts)}.")
    return sentences


def stand(sweeps: Iterable[Sweep], rate: float, measure: Measure) -> Standing | None:
    """Return who is best at a rate; None where fewer than two have a value."""
    found = [
        (sweep.title, compared["value"], compared["error"])
        for sweep in sweeps
        for point in sweep.points
        if point["rate"] == rate and (compared := point["compared"][measure.key]) is not None
    ]
    if len(found) < 2:
        return None
    found.sort(key=lambda one: -one[1] if measure.is_higher_better else one[1])
    first = found[0]
    level = [one for one in found if not _differ(first, one)]
    worse = [one for one in found if _differ(first, one)]
    return Standing(
        rate=rate,
        best=tuple(title for title, *_ in level),
        value=first[1],
        next=(worse[0][0], worse[0][1]) if worse else None,
    )


def best_tuned(sweeps: Sequence[Sweep]) -> Sweep | None:
    """Return the sweep with the most goodput over all rates; of equal ones, the one with the lowest p99 ITL."""
    measured = [sweep for sweep in sweeps if sweep.points]
    return max(measured, key=_merit, default=None)


def _merit(sweep: Sweep) -> tuple[float, float]:
    good = sum(point["compared"]["goodput_per_s"]["value"] for point in sweep.points)
    waits = [point["compared"]["itl_p99_ms"] for point in sweep.points]
    return good, -sum(math.inf if wait is None else wait["value"] for wait in waits)


def _differ(a: tuple[Any, float, float], b: tuple[Any, float, float]) -> bool:
    gap = abs(a[1] - b[1])
    return gap > ERRORS * math.hypot(a[2], b[2]) and gap > SMALLEST * max(abs(a[1]), abs(b[1]))


def _winners(standing: Standing) -> tuple[frozenset[str], bool]:
    return frozenset(standing.best), standing.next is None


def _part(group: list[Standing], measure: Measure) -> str:
    """Say who is best at some neighbouring rates, in numbers of the last of them."""
    last = group[-1]
    rates = _rates([standing.rate for standing in group])
    if last.next is None:
        return f"at {rates} no setup differs from the others by more than chance"
    who = _listed(last.best)
    does = "won" if len(last.best) == 1 else "won together"
    where = f" at {last.rate:g}" if len(group) > 1 else ""
    return (
        f"at {rates} {who} {does} ({_shown(last.value)} {measure.unit}{where}; "
        f"next {last.next[0]} with {_shown(last.next[1])}{_times(last)})"
    )


def _times(standing: Standing) -> str:
    assert standing.next is not None
    low, high = sorted((standing.value, standing.next[1]))
    return f", a factor of {high / low:.1f}" if low > 0 and high / low >= 1.2 else ""


def _rates(rates: Sequence[float]) -> str:
    shown = _listed([f"{rate:g}" for rate in rates])
    return f"{shown} requests/s" if rates != [1] else "1 request/s"


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
