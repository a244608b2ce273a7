"""Writes the table of docs/metrics.md, from `metrics.py` and `exposition.py`.

.venv/bin/python scripts/metrics_table.py            # the document
.venv/bin/python scripts/metrics_table.py --check    # say whether it is up to date; change nothing
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from headrace.shared import exposition, metrics
from headrace.shared.tally import Tally

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "metrics.md"

_TABLE = re.compile(r"(<!-- generated:metrics -->\n).*?(<!-- /generated -->)", re.DOTALL)
_KINDS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


def rows() -> list[tuple[str, str, str, str]]:
    """Return name as queries have it, kind, labels and meaning of every metric, in the order of the code."""
    found = []
    for metric in vars(metrics).values():
        if isinstance(metric, Tally):
            found.append((metric.name, "histogram", "", metric.documentation))
        elif isinstance(metric, (Counter, Gauge, Histogram)):
            (family,) = metric.describe()
            kind = _KINDS[type(metric)]
            name = f"{family.name}_total" if kind == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            found.append((name, kind, labels, family.documentation))
    for name, documentation in exposition.SHOWN.items():
        is_counter = name in exposition.COUNTERS
        labels = ", ".join(f"`{label}`" for label in exposition.LABELS)
        kind = "counter" if is_counter else "gauge"
        found.append((f"{name}_total" if is_counter else name, kind, labels, documentation))
    return found


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {labels} | {doc} |" for name, kind, labels, doc in rows()]
    return "\n".join(lines) + "\n"


def generated(text: str) -> str:
    """Return the document with the table made anew."""
    return _TABLE.sub(lambda match: f"{match[1]}{table()}{match[2]}", text)


def main(arguments: list[str]) -> int:
    """Write the document, or say whether it is up to date; return the exit code."""
    text = DOCUMENT.read_text()
    new = generated(text)
    if "--check" in arguments:
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
