"""CPU that a whole stack uses while nobody asks for anything: `python benchmarks/idle.py [SECONDS]`.

Starts `headrace up` on the demo model, waits for its ready line, reads what every process of it has used (user and
system time, from /proc), waits, reads again. Prints a row a process, in percent of one core.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def descendants(ancestor: int) -> list[int]:
    """Return the processes that descend from one, itself included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(stat(int(entry.name))[1])
            except OSError:
                continue
    found = [ancestor]
    for number in found:
        found += [child for child, parent in parents.items() if parent == number]
    return found


def stat(number: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat behind the command's name."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def cpu_s(number: int) -> float:
    """Return the CPU time that a process has used, in seconds."""
    fields = stat(number)
    return (int(fields[11]) + int(fields[12])) / TICKS


def name(number: int) -> str:
    """Return what a process is: its role where it has one."""
    words = Path(f"/proc/{number}/cmdline").read_bytes().decode().split("\0")
    if "serve" in words:
        return words[words.index("serve") + 1]
    return " ".join(Path(word).name for word in words[:4] if word)[:40]


def main() -> None:
    """Measure and print."""
    duration_s = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    command = [sys.executable, "-m", "headrace.cli.main", "up", "--port", "0"]
    stack = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert stack.stdout is not None
    try:
        if not stack.stdout.readline().startswith("ready "):
            raise SystemExit("the stack did not start")
        time.sleep(5)  # what start-up left to do
        numbers = descendants(stack.pid)
        before, started = {n: cpu_s(n) for n in numbers}, time.monotonic()
        time.sleep(duration_s)
        elapsed = time.monotonic() - started
        used = {n: 100 * (cpu_s(n) - before[n]) / elapsed for n in numbers}
        for number, percent in sorted(used.items(), key=lambda item: -item[1]):
            print(f"{percent:6.2f} %  {name(number)}")
        print(
            f"{sum(used.values()):6.2f} %  of one core, {len(numbers)} processes, {elapsed:.0f} s"
        )
    finally:
        stack.send_signal(signal.SIGINT)
        stack.wait()


if __name__ == "__main__":
    main()
