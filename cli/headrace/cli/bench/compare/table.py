"""A comparison as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.cli.bench.compare.points import Sweep

COLUMNS = (
    *("rate", "setup", "goodput/s", "good", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
    *("E2E p50", "token IDs/s", "errors", "prefilled elsewhere", "KV GB/s"),
)


def markdown(sweeps: Sequence[Sweep], sentences: Sequence[str], facts: Sequence[str]) -> str:
    """Return the whole report: what ran, who wins where, the table (times in ms), what did not run."""
    rates = sorted({point["rate"] for sweep in sweeps for point in sweep.points})
    rows = [
        _row(sweep, point)
        for rate in rates
        for sweep in sweeps
        for point in sweep.points
        if point["rate"] == rate
    ]
    lines = ["# The same engines put together differently", "", *facts, ""]
    lines += [f"- {sentence}" for sentence in sentences]
    lines += ["", _line(COLUMNS), _line(["---"] * len(COLUMNS)), *map(_line, rows)]
    lines += _stages(sweeps)
    skipped = [sweep for sweep in sweeps if sweep.skipped]
    lines += ["", *(f"Not measured: {sweep.title}: {sweep.skipped}" for sweep in skipped)]
    return "\n".join(lines).rstrip() + "\n"


def _stages(sweeps: Sequence[Sweep]) -> list[str]:
    """Return a table of where headrace's requests spent their time; nothing without any."""
    split = [
        (sweep.title, point["rate"], stages)
        for sweep in sweeps
        for point in sweep.points
        if (stages := point.get("stages"))
    ]
    names = list(
        dict.fromkeys(
            n for *_, stages in split for n, row in stages.items() if n.endswith("_ms") and row
        )
    )
    if not names:
        return []
    heads = ["rate", "setup", *(name.removesuffix("_ms").replace("_", " ") for name in names)]
    rows = [
        _line([f"{rate:g}", title, *(_ms(stages.get(name) or {}, "p50") for name in names)])
        for title, rate, stages in sorted(split, key=lambda one: one[1])
    ]
    return [
        "",
        "Where headrace's requests spent their time, p50:",
        "",
        _line(heads),
        _line(["---"] * len(heads)),
        *rows,
    ]


def _row(sweep: Sweep, point: dict[str, Any]) -> list[str]:
    ttft, itl, e2e = (point[name] or {} for name in ("ttft_ms", "itl_ms", "e2e_ms"))
    stages = point.get("stages") or {}
    return [
        f"{point['rate']:g}",
        sweep.title,
        f"{point['compared']['goodput_per_s']['value']:.2f}",
        f"{point['goodput']['share'] or 0:.0%}",
        *(_ms(ttft, "p50"), _ms(ttft, "p99"), _ms(itl, "p50"), _ms(itl, "p99")),
        _ms(e2e, "p50"),
        f"{point['output_token_ids_per_s']:.0f}",
        str(point["num_errors"]),
        _elsewhere(stages.get("prefill_modes") or {}),
        f"{stages['kv_gb_per_s']:.2f}" if "kv_gb_per_s" in stages else "",
    ]


def _elsewhere(modes: dict[str, int]) -> str:
    total = sum(modes.values())
    return f"{modes.get('remote', 0) / total:.0%}" if total else ""


def _ms(row: dict[str, float], name: str) -> str:
    return f"{row[name]:.1f}" if name in row else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
