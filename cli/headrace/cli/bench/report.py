"""What a run measured, as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("mean", "p50", "p90", "p99", "max")
ROWS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def show(found: dict[str, Any], console: Console) -> None:
    """Print a summary."""
    console.print(
        f"{found['num_requests']} requests in {found['duration_s']:.1f} s, {found['num_errors']} failed: "
        f"{found['requests_per_s']:.2f} requests/s, {found['output_token_ids_per_s']:.1f} output token IDs/s"
    )
    for error in found["errors"]:
        console.print(f"  {error}", style="red", markup=False)
    table = _table("ms")
    for name, title in ROWS.items():
        _add(table, title, found[name])
    console.print(table)
    if good := found.get("goodput"):
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in good["limits_ms"].items())
        console.print(
            f"goodput ({limits}): {good['requests_per_s']:.2f} requests/s, {good['share']:.1%} of all"
        )
    if stages := found.get("stages"):
        table = _table("stages, ms")
        for name, row in stages.items():
            if name.endswith("_ms"):
                _add(table, name.removesuffix("_ms").replace("_", " "), row)
        console.print(table)
        if "kv_gb_per_s" in stages:
            console.print(f"KV cache: {stages['kv_gb_per_s']:.2f} GB/s")


def _table(title: str) -> Table:
    table = Table(title, box=None, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    return table


def _add(table: Table, title: str, row: dict[str, float] | None) -> None:
    if row is not None:
        table.add_row(title, *(f"{row[column]:.1f}" for column in COLUMNS))
