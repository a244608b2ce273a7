"""What a comparison measures of each run, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.bench.compare import plots
from headrace.cli.bench.compare.points import Sweep, point
from headrace.cli.bench.compare.rounds import merged
from headrace.cli.bench.compare.run import without_lesser_tuned
from headrace.cli.bench.compare.table import markdown
from headrace.cli.bench.measures import Measured
from headrace.shared.errors import SettingsError

LIMITS_MS = {"ttft": 1_000.0}


def measured(ttft_s: float, itl_s: float = 0.01, num: int = 20) -> list[Measured]:
    return [
        Measured(
            start=0.0,
            ttft_s=ttft_s,
            itls_s=[itl_s] * 4,
            e2e_s=ttft_s + 4 * itl_s,
            num_output_token_ids=5,
            stages={
                "prefill_mode": "remote",
                "prefill_s": 0.2,
                "kv_transfer_s": 0.001,
                "kv_transfer_bytes": 10**6,
            },
        )
        for _ in range(num)
    ]


def sweep(title: str, *ttfts_s: float, is_tuned: bool = False) -> Sweep:
    points = [point(rate, measured(s), LIMITS_MS) for rate, s in enumerate(ttfts_s, 1)]
    return Sweep(name=title, title=title, points=points, is_tuned=is_tuned)


def test_a_point_has_its_measures_and_how_far_another_run_might_be() -> None:
    late = point(4, [*measured(0.5), *measured(2.0)], LIMITS_MS)
    goodput = late["compared"]["goodput_per_s"]
    assert goodput["value"] == 2.0
    assert goodput["error"] == pytest.approx(4 * (0.25 / 44) ** 0.5, abs=1e-4)
    assert late["compared"]["itl_p99_ms"] == {"value": 10.0, "error": 0.0}
    assert late["compared"]["ttft_p50_ms"]["error"] > 100
    assert late == point(4, [*measured(0.5), *measured(2.0)], LIMITS_MS)


def test_a_share_of_all_is_not_without_error() -> None:
    assert point(1, measured(0.5), LIMITS_MS)["compared"]["goodput_per_s"]["error"] > 0


def test_a_run_in_which_nothing_was_answered_has_no_times() -> None:
    failed = point(1, [Measured(start=0.0, error="HTTP 500")] * 3, LIMITS_MS)
    assert failed["compared"]["goodput_per_s"]["value"] == 0
    assert failed["compared"]["itl_p99_ms"] is failed["compared"]["ttft_p50_ms"] is None


def test_of_the_tuned_ones_the_best_is_kept() -> None:
    sweeps = [
        sweep("plain", 2.0),
        sweep("512", 2.0, is_tuned=True),
        sweep("2048", 0.5, is_tuned=True),
    ]
    assert [one.name for one in without_lesser_tuned(sweeps)] == ["plain", "2048"]


def test_the_table_has_a_line_for_each_setup_at_each_rate_and_says_what_was_not_measured() -> None:
    coupled = Sweep(
        name="coupled", title="vllm serve", skipped="it takes 2 GPUs, and 0 are visible"
    )
    text = markdown([coupled, sweep("pd", 0.5, 2.0)], ["PD wins."], ["`headrace bench`"])
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:4]
    assert [row[:4] for row in rows] == [
        ["| 1", "pd", "1.00", "100%"],
        ["| 2", "pd", "0.00", "0%"],
    ]
    assert rows[0][-2:] == ["100%", "1.00 |"]
    assert "- PD wins." in text
    assert "Not measured: vllm serve: it takes 2 GPUs" in text


def test_the_table_says_where_headraces_requests_spent_their_time() -> None:
    text = markdown(merged([sweep("pd", 0.5), Sweep(name="x", title="x")]), [], [])
    _, stages = text.split("spent their time")
    head, _, row = [line for line in stages.splitlines() if line.startswith("| ")]
    assert head.split(" | ")[2:] == ["kv transfer", "prefill |"]
    assert row.split(" | ")[2:] == ["1.0", "200.0 |"]


def test_each_measure_has_a_plot_in_two_formats(tmp_path: Path) -> None:
    failed = sweep("failed", 1.0)
    failed.points[0]["compared"] |= {"itl_p99_ms": None, "ttft_p50_ms": None}
    paths = plots.draw([sweep("pd", 0.5, 2.0), failed, Sweep(name="x", title="x")], tmp_path)
    assert sorted(path.name for path in paths) == [
        f"{key}.{ending}"
        for key in ("goodput_per_s", "itl_p99_ms", "ttft_p50_ms")
        for ending in ("png", "svg")
    ]
    assert all(path.stat().st_size > 1_000 for path in paths)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'headrace\[bench\]'"):
        plots.check_matplotlib()
