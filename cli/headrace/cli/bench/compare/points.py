"""What one setup gave at one rate, and how far another run of the same might be from it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.cli.bench.measures import Measured, percentile, summary

T = TypeVar("T")

ROUNDS = 100
"""Of resampling: the error of an error need not be small."""


@dataclass(kw_only=True, slots=True)
class Sweep:
    """One setup at all rates."""

    name: str
    title: str
    points: list[dict[str, Any]] = field(
        default_factory=list
    )  #: as `point` makes them, one a start and rate
    skipped: str = ""  #: why there are none, or no more
    is_tuned: bool = False


def point(rate: float, measured: Sequence[Measured], limits_ms: dict[str, float]) -> dict[str, Any]:
    """Return the summary of one run, with `rate`, what is compared, and the standard error of each.

    Goodput is the share of good requests times the rate: how long the last answer takes says nothing of it.
    """
    answered = [one for one in measured if not one.error]
    found = summary(measured, limits_ms)
    share = found["goodput"]["share"] or 0.0
    ttfts = [one.ttft_s for one in answered if one.ttft_s is not None]
    itls = [one.itls_s for one in answered if one.itls_s]
    compared = {
        "goodput_per_s": (share * rate, _share_error(share, len(measured)) * rate),
        "itl_p99_ms": _with_error(itls, _pooled_p99),
        "ttft_p50_ms": _with_error(ttfts, lambda some: percentile(some, 50)),
    }
    return {
        "rate": rate,
        **found,
        "compared": {
            name: None
            if value is None
            else {"value": round(value[0], 4), "error": round(value[1], 4)}
            for name, value in compared.items()
        },
    }


def _share_error(share: float, num: int) -> float:
    """Return the standard error of a share; of all or none it is not 0 (Agresti and Coull)."""
    likely = (share * num + 2) / (num + 4)
    return math.sqrt(likely * (1 - likely) / (num + 4))


def _with_error(
    values: Sequence[T], statistic: Callable[[Sequence[T]], float]
) -> tuple[float, float] | None:
    """Return a statistic of times in ms, and its standard error by resampling the requests; None without any."""
    if not values:
        return None
    again = random.Random(0)
    found = [statistic(again.choices(values, k=len(values))) for _ in range(ROUNDS)]
    mean = sum(found) / ROUNDS
    error = math.sqrt(sum((value - mean) ** 2 for value in found) / (ROUNDS - 1))
    return statistic(values) * 1e3, error * 1e3


def _pooled_p99(of_requests: Sequence[Sequence[float]]) -> float:
    return percentile([itl for itls in of_requests for itl in itls], 99)
