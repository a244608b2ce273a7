"""What `headrace doctor` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.doctor.finding import Finding
from headrace.cli.doctor.verdict import Verdict

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
PLAIN_WIDTH = 120  # columns of a text that goes to no terminal


def show(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """Print one group of findings; what to change stands below what was found."""
    console.print(Text(title, style="bold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        text = Text(finding.found)
        if finding.right:
            text.append(f"\nright: {finding.right}", style="italic")
        if finding.setting:
            text.append(f"\nchange: {finding.setting}", style="bold")
        table.add_row(
            Text(f"  {finding.status}", style=STYLES[finding.status]), Text(finding.name), text
        )
    console.print(table)
    console.print()


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print what prompts of each length cost, and the sentence."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("  PROMPT", "BLOCKS", "MOVED IN", "PREFILL", "FIRST TOKEN", "SHARE", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in verdict.rows:
        table.add_row(
            f"{row.num_token_ids:,}",
            f"{row.kv_bytes / 1e6:,.1f} MB",
            f"{row.kv_s * 1000:,.1f} ms",
            f"{row.prefill_s * 1000:,.1f} ms",
            f"{row.first_token_s * 1000:,.1f} ms",
            f"{row.share:.1%}",
            "measured" if row.is_measured else "scaled",
        )
    console.print(table)
    console.print()
    console.print(Text(verdict.sentence))
