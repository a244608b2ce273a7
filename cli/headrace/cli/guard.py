"""Outlives the supervisor by a moment: kills its process groups when it is gone, however it went.

Reads `+<group>` and `-<group>` lines from stdin; the end of the file means that the supervisor has
ended. PR_SET_PDEATHSIG reaches a worker only; an engine's own children are reached by their group.
Runs as a plain script on the standard library, so that it costs little.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def watch(lines: Iterable[str]) -> set[int]:
    """Return the process groups that were named and not taken back when `lines` ended."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def main() -> None:
    """Watch stdin, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in watch(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
