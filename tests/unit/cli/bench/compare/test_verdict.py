"""Which setup wins where, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.bench.compare.points import Sweep
from headrace.cli.bench.compare.verdict import MEASURES, best_tuned, stand, verdict

GOODPUT, ITL, TTFT = MEASURES


def at(rate: float, good: float, itl: float, ttft: float, error: float = 0.01) -> dict[str, Any]:
    values = {GOODPUT.key: good, ITL.key: itl, TTFT.key: ttft}
    compared = {key: {"value": value, "error": error * value} for key, value in values.items()}
    return {"rate": rate, "compared": compared}


def setup(title: str, *points: dict[str, Any], **more: Any) -> Sweep:
    return Sweep(name=title, title=title, points=list(points), **more)


def test_the_winner_is_named_with_its_numbers_and_the_next() -> None:
    pd = setup("1P1D", at(1, 1.0, 12, 500), at(2, 2.0, 14, 600))
    replicas = setup("2 replicas", at(1, 1.0, 60, 400), at(2, 1.2, 70, 450))
    assert verdict([replicas, pd]) == [
        "Goodput: at 1 request/s no setup differs from the others by more than chance; at 2 requests/s "
        "1P1D won (2.00 good requests/s; next 2 replicas with 1.20, a factor of 1.7).",
        "p99 ITL: at 1 and 2 requests/s 1P1D won (14.0 ms at 2; next 2 replicas with 70.0, a factor of 5.0).",
        "Median TTFT: at 1 and 2 requests/s 2 replicas won (450 ms at 2; next 1P1D with 600, a factor of 1.3).",
    ]


def test_what_lies_within_the_noise_of_the_best_is_level_with_it() -> None:
    close = [setup(name, at(1, 1.0, itl, 1)) for name, itl in (("a", 20.0), ("b", 20.5))]
    far = setup("c", at(1, 1.0, 30, 1))
    standing = stand([*close, far], 1, ITL)
    assert standing is not None
    assert standing.best == ("a", "b")
    assert standing.next == ("c", 30)
    assert "a and b won together" in verdict([*close, far])[1]


@pytest.mark.parametrize(
    ("other", "error", "is_level"),
    [
        (20.3, 0.0, True),  # no noise, and too small to matter
        (21.0, 0.0, False),
        (24.0, 0.1, True),  # large, and so is the noise
        (30.0, 0.1, False),
    ],
)
def test_a_difference_must_be_larger_than_chance_and_large_enough_to_matter(
    other: float, error: float, is_level: bool
) -> None:
    sweeps = [setup("a", at(1, 1, 20, 1, error)), setup("b", at(1, 1, other, 1, error))]
    standing = stand(sweeps, 1, ITL)
    assert standing is not None
    assert (standing.next is None) is is_level


def test_more_goodput_is_better_and_less_time_is() -> None:
    sweeps = [setup("much", at(1, 2, 2, 2)), setup("little", at(1, 1, 1, 1))]
    best = [standing.best for m in MEASURES if (standing := stand(sweeps, 1, m)) is not None]
    assert best == [("much",), ("little",), ("little",)]


def test_who_has_no_value_does_not_take_part() -> None:
    failed = setup("failed", at(1, 0.0, 1, 1))
    failed.points[0]["compared"][ITL.key] = None
    others = [setup("a", at(1, 1, 10, 1)), setup("b", at(1, 1, 20, 1))]
    standing = stand([failed, *others], 1, ITL)
    assert standing is not None
    assert (standing.best, standing.next) == (("a",), ("b", 20))
    assert stand([failed, others[0]], 1, ITL) is None


def test_of_one_setup_nothing_is_said() -> None:
    assert verdict([setup("a", at(1, 1, 1, 1)), setup("b", skipped="no GPU")]) == []


def test_the_best_tuned_one_has_the_most_goodput_over_all_rates() -> None:
    early = setup("512", at(1, 1.0, 9, 1), at(2, 1.0, 9, 1))
    late = setup("2048", at(1, 0.9, 9, 1), at(2, 1.8, 9, 1))
    quicker = setup("8192", at(1, 0.9, 5, 1), at(2, 1.8, 5, 1))
    assert best_tuned([early, late]) is late
    assert best_tuned([early, late, quicker]) is quicker
    assert best_tuned([setup("x", skipped="no")]) is None
