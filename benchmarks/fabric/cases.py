"""The cases of `run.py` and `chain.py`: how they are written, the engines alone, and the rows they come to."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import summary

HERE = Path(__file__).parent
MIN_RAMP_S = 1.0
MAX_RAMP_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One load."""

    streams: int  #: open at any time
    step_s: float  #: of the fake engine; 0: saturation
    token_ids: int  #: of each answer

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `streams:step_ms:token_ids`."""
        streams, step_ms, token_ids = text.split(":")
        return cls(streams=int(streams), step_s=float(step_ms) / 1e3, token_ids=int(token_ids))

    @property
    def ramp_s(self) -> float:
        """Over how long the streams begin: an answer's length, so that they end as evenly as they began."""
        return min(MAX_RAMP_S, max(MIN_RAMP_S, self.step_s * self.token_ids))

    def arguments(self, window_s: float, cpus: str) -> list[str]:
        """Return what both programs are told."""
        return [
            *("--streams", str(self.streams), "--token-ids", str(self.token_ids)),
            *("--ramp-s", str(self.ramp_s), "--window-s", str(window_s), "--cpus", cpus),
        ]


Measure = Callable[[Case], tuple[dict[str, Any], dict[str, float]]]
"""Returns what the reader found, and the CPU seconds of each service, with `rest`."""


def add_options(parser: argparse.ArgumentParser, cases: str) -> None:
    """Add what both programs are told; `cases` are those by default."""
    parser.add_argument("--cases", default=cases)
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path)


def rows(
    cases: str, window_s: float, measure: Measure, cpus: set[int] | None = None
) -> list[dict[str, Any]]:
    """Measure each case, and the engines alone on `cpus`; tell of each as it is done."""
    found = []
    for case in map(Case.parse, cases.split(",")):
        stack, cpu_s = measure(case)
        found.append(
            summary.row(
                streams=case.streams,
                step_s=case.step_s,
                token_ids=case.token_ids,
                stack=stack,
                cpu_s=cpu_s,
                alone=alone(case, window_s, cpus or set()),
            )
        )
        sys.stderr.write(f"{summary.line(found[-1])}\n")
    return found


def alone(case: Case, window_s: float, cpus: set[int]) -> dict[str, Any]:
    """Return what the engines alone gave."""
    command = [sys.executable, str(HERE / "alone.py"), "--step-s", str(case.step_s)]
    command += case.arguments(window_s, ",".join(map(str, cpus)))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def write(result: dict[str, Any], out: Path | None) -> None:
    """Print a result, and keep it in `out`."""
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if out:
        out.write_text(text)
