"""What a batch says of how far it is."""

from __future__ import annotations

from headrace.cli.batch.progress import Counts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_the_time_left_go_by_what_was_done_now() -> None:
    clock = Clock()
    counts = Counts(1_000, clock)
    for _ in range(5):
        counts.skipped(100)
    clock.now += 10
    for _ in range(3):
        counts.ended(50, is_ok=True, num_token_ids=200)
    counts.ended(50, is_ok=False)
    assert counts.seconds_left == 15.0
    assert str(counts) == "9 lines, 1 failed, 0.4 lines/s, 60 tokens/s, 0:15 left"


def test_a_long_time_left_has_hours() -> None:
    clock = Clock()
    counts = Counts(3_700, clock)
    clock.now += 1
    counts.ended(1, is_ok=True)
    assert str(counts).endswith(", 1:01:39 left")


def test_without_a_size_or_a_result_no_time_is_left_to_tell() -> None:
    unknown, begun = Counts(0), Counts(10)
    unknown.ended(5, is_ok=True)
    assert unknown.seconds_left is None
    assert begun.seconds_left is None
    assert "left" not in str(begun)
