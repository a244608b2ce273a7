from __future__ import annotations

from headrace.cli.worker import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_long_life_starts_the_pauses_anew() -> None:
    backoff = Backoff()
    assert [backoff.after(life) for life in (1, 1, 59.9, 60, 1)] == [0.5, 1, 2, 0.5, 1]
