"""A running `headrace up` with fake engines, and the CPU that each of its services has used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from idle import cpu_s, descendants, name

SERVICES = ("gateway", "render", "prefill", "decode", "derender", "broker")
SLOTS = 2048  # more than any case has streams
CLK_TCK = os.sysconf("SC_CLK_TCK")


class Stack:
    """The processes of one `headrace up`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self._process = process

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time used so far, in seconds, by service; the supervisor and its helpers are `other`."""
        used = dict.fromkeys((*SERVICES, "other"), 0.0)
        for number in descendants(self._process.pid):
            try:
                what, seconds = name(number), cpu_s(number)
            except (FileNotFoundError, ProcessLookupError):
                continue
            service = "broker" if what.startswith("nats-server") else what
            used[service if service in used else "other"] += seconds
        return used


def cpu_of(ancestor: int) -> float:
    """Return the CPU time that a process and its descendants have used so far, in seconds."""
    return sum(cpu_s(number) for number in descendants(ancestor))


def busy_s() -> float:
    """Return the CPU time that all processes of this machine have used so far, in seconds."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / CLK_TCK


@contextmanager
def running(
    step_s: float, home: Path, cpus: set[int], extra: list[str] | None = None
) -> Iterator[Stack]:
    """Start a stack on these CPUs (none: all), wait until it is ready; drain it in the end."""
    command = [sys.executable, "-m", "headrace.cli.main", "up", "--engine", "fake", "--port", "0"]
    command += ["--served-model-name", "fake", "--batch", "0"]
    for setting in settings_of(step_s) + (extra or []):
        command += ["--set", setting]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "HEADRACE_HOME": str(home)},
        preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise SystemExit(f"the stack did not start: see the logs in {home / 'run'}")
        yield Stack(process, ready[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def settings_of(step_s: float) -> list[str]:
    """Return what the stack has other than by default: every prompt goes through prefill, nothing is short of room."""
    return [
        f"fake.step_s={step_s}",
        "fake.num_blocks=65536",
        "decode.local_prefill_threshold=0",
        *(f"{role}.slots={SLOTS}" for role in ("render", "prefill", "decode", "derender")),
    ]
