"""What the pipeline itself costs: `python benchmarks/fabric/run.py [--cases LIST] [--cpus 0,1] [--out FILE]`.

A case is `streams:step_ms:token_ids`: so many streams open at any time, fake engines that take so long a step,
answers of so many token IDs. Each is run twice, one after the other: over HTTP through a whole `headrace up` (real
broker, real processes; every prompt through prefill), and by calling the same engines in one process. What the
pipeline adds is the difference. A step of 0 ms is saturation: the engine is faster than all else.

`--cpus` is where the stack runs, and the engines alone; `--load-cpus` is where the reader runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import summary
from stack import SERVICES, Stack, busy_s, running

HERE = Path(__file__).parent
CASES = "1:5:16,32:20:128,256:50:128,1000:100:128,256:0:512"
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


def through_stack(
    case: Case, options: argparse.Namespace, home: Path
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what the reader found, and the CPU seconds of each service in its window.

    `rest` among them is what all other processes of the machine used: on a quiet one, next to nothing.
    """
    with running(case.step_s, home, options.cpus, options.set) as stack:
        command = [sys.executable, str(HERE / "load.py"), stack.url]
        command += case.arguments(options.window_s, options.load_cpus)
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        try:
            before = _used(stack, reader.stdout.readline(), "begin")
            after = _used(stack, reader.stdout.readline(), "end")
            found: dict[str, Any] = json.loads(reader.stdout.readline())
        finally:
            reader.kill()
            reader.wait()
    cpu_s = {service: after[service] - before[service] for service in after}
    ours = sum(cpu_s[service] for service in (*SERVICES, "other")) + found["cpu_s"]
    cpu_s["rest"] = max(0.0, cpu_s["rest"] - ours)
    return found, cpu_s


def _used(stack: Stack, line: str, expected: str) -> dict[str, float]:
    if line.strip() != expected:
        raise SystemExit(f"the reader ended: {line}")
    return {**stack.cpu_s(), "rest": busy_s()}


def alone(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the engines alone gave."""
    command = [sys.executable, str(HERE / "alone.py"), "--step-s", str(case.step_s)]
    command += case.arguments(options.window_s, ",".join(map(str, options.cpus)))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument("--cpus", type=_cpus, default=set(), metavar="LIST")
    parser.add_argument("--load-cpus", default="", metavar="LIST")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for case in map(Case.parse, options.cases.split(",")):
        with tempfile.TemporaryDirectory() as home:
            found, cpu_s = through_stack(case, options, Path(home))
        rows.append(
            summary.row(
                streams=case.streams,
                step_s=case.step_s,
                token_ids=case.token_ids,
                stack=found,
                cpu_s=cpu_s,
                alone=alone(case, options),
            )
        )
        sys.stderr.write(f"{summary.line(rows[-1])}\n")
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "cpus": sorted(options.cpus),
            "load_cpus": options.load_cpus,
        },
        "window_s": options.window_s,
        "rows": rows,
    }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)


def _cpus(text: str) -> set[int]:
    return {int(cpu) for cpu in text.split(",") if cpu}


if __name__ == "__main__":
    main()
