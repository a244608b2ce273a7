"""What `headrace bench` makes of the requests that it measured."""

from __future__ import annotations

import pytest

from headrace.cli.bench.measures import (
    Measured,
    distribution,
    goodput_limits,
    is_good,
    percentile,
    summary,
)


def answered(**more: float) -> Measured:
    given = {"ttft_s": 0.5, "e2e_s": 1.5, "num_output_token_ids": 11} | more
    return Measured(start=10.0, itls_s=[0.1] * 10, num_prompt_token_ids=7, **given)  # type: ignore[arg-type]  # one of them is an int


def test_a_percentile_lies_between_two_values() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0


def test_a_distribution_is_in_ms_and_leaves_out_what_was_not_measured() -> None:
    assert distribution([0.001, None, 0.003]) == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": 2.8,
        "p99": 2.98,
        "max": 3.0,
    }
    assert distribution([None]) is None


def test_the_time_a_token_leaves_out_the_first() -> None:
    assert answered().tpot_s == pytest.approx(0.1)
    assert answered(num_output_token_ids=1).tpot_s is None


def test_goodput_counts_a_request_within_every_limit() -> None:
    limits = goodput_limits("ttft:500 tpot:101")
    assert is_good(answered(), limits)
    assert not is_good(answered(ttft_s=0.6), limits)
    assert not is_good(answered(e2e_s=3.0), limits)
    assert not is_good(Measured(start=0.0, error="HTTP 429"), limits)


def test_a_measure_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'tbt' is no measure"):
        goodput_limits("tbt:3")


def test_goodput_can_limit_the_longest_waits_inside_each_answer() -> None:
    stalled = answered()
    stalled.itls_s[3] = 0.9
    limits = goodput_limits("itl:110 tpot:110")
    assert is_good(answered(), limits)
    assert not is_good(stalled, limits)
    assert is_good(Measured(start=0.0, ttft_s=0.1, num_output_token_ids=1), limits)


def test_a_failed_request_counts_in_no_time_and_in_no_rate() -> None:
    found = summary([answered(), Measured(start=10.0, error="HTTP 429")], {"ttft": 500.0})
    assert (found["num_requests"], found["num_errors"], found["errors"]) == (2, 1, ["HTTP 429"])
    assert found["ttft_ms"]["max"] == 500.0
    assert found["requests_per_s"] == round(1 / 1.5, 4)
    assert found["goodput"]["share"] == 0.5


def test_the_stages_of_headrace_come_with_the_speed_of_the_kv_cache() -> None:
    one = answered()
    one.stages = {"prefill_s": 0.2, "kv_transfer_s": 0.5, "kv_transfer_bytes": 10**9}
    two = answered()
    two.stages = {"prefill_s": 0.4, "prefill_mode": "local"}
    stages = summary([one, two], {})["stages"]
    assert stages["prefill_ms"]["p50"] == pytest.approx(300.0)
    assert stages["kv_gb_per_s"] == 2.0
    assert stages["prefill_modes"] == {"None": 1, "local": 1}
