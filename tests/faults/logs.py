"""What the processes wrote in their logs: how often they said what, and what must never be there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .check import Violation

NEVER = ("unexpected_error", "handler_failed", "blob_unreadable")
MAX_SHOWN = 5


class _Line(msgspec.Struct):
    level: str = ""
    logger: str = ""
    message: str = ""
    action: str = ""
    exception: str = ""
    time: str = ""


def read(logs: Iterable[Path]) -> tuple[Counter[str], list[Violation]]:
    """Return how often each warning or error was logged, and what no process should ever say."""
    counts: Counter[str] = Counter()
    found: list[Violation] = []
    shown: Counter[str] = Counter()
    for log in logs:
        for raw in log.read_bytes().splitlines():
            line = _line(raw)
            if line is None:
                text = raw.decode(errors="replace")
                found.append(Violation("log", "", f"{log.name}: {text[:200]}"))
                continue
            if line.level not in ("warning", "error", "critical"):
                continue
            key = f"{log.stem.split('-')[0]} {line.level} {line.action or line.message[:60]}"
            counts[key] += 1
            if line.action in NEVER or (line.exception and line.level != "warning"):
                shown[key] += 1
                if shown[key] <= MAX_SHOWN:
                    last = line.exception.strip().rpartition("\n")[2]
                    text = f"{log.name} {line.time}: {line.message[:200]} {last[:300]}"
                    found.append(Violation("log", "", text))
    return counts, found


def _line(raw: bytes) -> _Line | None:
    try:
        return msgspec.json.decode(raw, type=_Line)
    except msgspec.DecodeError:
        return None
