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
from pathlib import Path
from typing import Any

import cases
from cases import HERE, Case
from stack import SERVICES, Stack, busy_s, running

CASES = "1:5:16,32:20:128,256:50:128,1000:100:128,256:0:512"


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    cases.add_options(parser, CASES)
    parser.add_argument("--cpus", type=_cpus, default=set(), metavar="LIST")
    parser.add_argument("--load-cpus", default="", metavar="LIST")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()

    def measure(case: Case) -> tuple[dict[str, Any], dict[str, float]]:
        with tempfile.TemporaryDirectory() as home:
            return through_stack(case, options, Path(home))

    rows = cases.rows(options.cases, options.window_s, measure, options.cpus)
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
    cases.write(result, options.out)


def _cpus(text: str) -> set[int]:
    return {int(cpu) for cpu in text.split(",") if cpu}


if __name__ == "__main__":
    main()
