"""Several starts of each setup: their mean, and what one start may be away from another."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.bench.compare.points import Sweep
from headrace.cli.bench.compare.rounds import merged
from headrace.cli.bench.compare.verdict import MEASURES, stand, verdict

ITL = MEASURES[1]


def at(rate: float, itl: float | None, error: float = 0.1) -> dict[str, Any]:
    """A point whose requests differ little among themselves."""
    compared: dict[str, Any] = {
        "goodput_per_s": {"value": rate, "error": 0.1},
        "itl_p99_ms": None if itl is None else {"value": itl, "error": error},
        "ttft_p50_ms": {"value": 100.0, "error": 1.0},
    }
    return {"rate": rate, "num_errors": 1, "ttft_ms": {"p50": itl}, "compared": compared}


def setup(title: str, *points: dict[str, Any]) -> Sweep:
    return Sweep(name=title, title=title, points=list(points))


def test_the_rounds_of_a_rate_are_one_point_with_their_mean() -> None:
    (one,) = merged([setup("a", at(1, 10.0), at(2, 30.0), at(1, 14.0), at(2, 34.0))])
    assert [(point["rate"], point["num_rounds"]) for point in one.points] == [(1, 2), (2, 2)]
    assert [point["compared"]["itl_p99_ms"]["value"] for point in one.points] == [12.0, 32.0]
    assert [point["ttft_ms"]["p50"] for point in one.points] == [12.0, 32.0]
    assert one.points[0]["num_errors"] == 2


def test_what_no_round_has_is_missing_and_what_one_has_counts() -> None:
    (one,) = merged([setup("a", at(1, None), at(1, 14.0), at(2, None))])
    compared = [point["compared"]["itl_p99_ms"] for point in one.points]
    assert compared == [{"value": 14.0, "error": 0.1}, None]


def test_how_far_starts_are_apart_is_told_by_all_setups_and_counts_for_each() -> None:
    uneven = setup("uneven", at(1, 18.0), at(1, 22.0))
    even = setup("even", at(1, 23.0), at(1, 23.0))
    merged_ones = merged([uneven, even])
    errors = [one.points[0]["compared"]["itl_p99_ms"]["error"] for one in merged_ones]
    spread = (0.02 / 2) ** 0.5  # the mean of 0.02 and 0, of values relative to their means
    assert errors == pytest.approx([20 * spread / 2**0.5, 23 * spread / 2**0.5])


def test_two_setups_that_differ_as_starts_of_one_do_are_level() -> None:
    sweeps = [setup("a", at(1, 18.0), at(1, 22.0)), setup("b", at(1, 21.0), at(1, 24.0))]
    apart = stand(sweeps, 1, ITL)
    together = stand(merged(sweeps), 1, ITL)
    assert together is not None
    assert apart is not None
    assert apart.next is not None  # by the requests of single starts alone
    assert together.best == ("a", "b")
    assert len(verdict(merged(sweeps))) == 3
