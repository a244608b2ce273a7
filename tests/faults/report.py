"""What a run prints and keeps: a line while it goes on, a table and a file at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from .check import Violation, excuse, touching
from .inject import Fault
from .record import Record

MAX_SHOWN = 8


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def progress(records: list[Record], faults: list[Fault], num_open: int) -> str:
    """Return the line that is printed every few seconds."""
    ends = Counter(str(record.end) for record in records if record.ended is not None)
    now = [f"{fault.kind} {fault.target}" for fault in faults if fault.healed is None]
    return (
        f"{sum(ends.values())} ended ({_counts(ends)}), {num_open} open, {len(faults)} faults, "
        f"now: {', '.join(now) or 'none'}"
    )


def table(
    records: list[Record],
    faults: list[Fault],
    violations: list[Violation],
    more: dict[str, Any],
    *,
    patience: float,
) -> list[str]:
    """Return the lines of the final table."""
    ways = Counter(f"{r.order.lane} {r.order.way} {r.end}" for r in records)
    failed = [r for r in records if r.end in ("error", "cut", "refused")]
    excuses = [excuse(r, touching(r, faults, patience=patience)) for r in failed]
    errors = Counter(
        f"{r.http_status or '-'} {r.end}: {why or 'NOT EXCUSED'}"
        for r, why in zip(failed, excuses, strict=True)
    )
    late = sorted(r.late_s for r in records if r.ended is not None and r.late_s > 0)
    lines = [
        f"faults     {len(faults)}: {_counts(Counter(fault.kind for fault in faults))}",
        f"requests   {len({r.order.number for r in records})} in {len(records)} attempts",
        *(f"  {num:6d} {what}" for what, num in sorted(ways.items())),
        "errors",
        *(f"  {num:6d} {what}" for what, num in errors.most_common()),
        f"past the deadline: {len(late)}, at most {max(late, default=0.0):.2f} s",
        *(f"{name:10s} {value}" for name, value in more.items()),
        *violation_lines(violations),
    ]
    return lines


def violation_lines(violations: list[Violation]) -> list[str]:
    """Return how many of each kind there are, and the first ones of each."""
    kinds = Counter(violation.kind for violation in violations)
    lines = [f"violations {len(violations)}: {_counts(kinds) or 'none'}"]
    shown: Counter[str] = Counter()
    for violation in violations:
        shown[violation.kind] += 1
        if shown[violation.kind] <= MAX_SHOWN:
            lines.append(f"  {violation.kind} {violation.request_id}: {violation.text}")
    return lines


def write(
    path: Path,
    seed: int,
    records: list[Record],
    faults: list[Fault],
    violations: list[Violation],
    more: dict[str, Any],
) -> None:
    """Keep all of it as JSON."""
    seen = [
        {
            "request_id": r.request_id,
            "kind": r.order.kind,
            "lane": r.order.lane,
            "way": r.order.way,
            "stream": r.order.stream,
            "ending": r.order.ending,
            "gateway": r.gateway,
            "sent": r.sent,
            "ended": r.ended,
            "deadline": r.deadline,
            "end": r.end,
            "http_status": r.http_status,
            "message": r.message,
            "num_events": r.num_events,
            "problems": r.problems,
            "workers": r.workers,
        }
        for r in records
    ]
    value = {
        "seed": seed,
        "violations": violations,
        "faults": faults,
        "requests": seen,
        **more,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {num}" for name, num in counts.most_common())
