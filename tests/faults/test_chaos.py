"""The fault harness, for a minute: the long runs are `make chaos`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 900.0  # only when all is lost
# What is late, and when blocks must be free, is a matter of seconds on an idle machine: the long runs hold
# to that. A machine that runs other things as well gets five times as long here, and deadlines are as far off.
PATIENCE = ("--patience", "5")


def run(module: str, *words: str) -> None:
    """Run it as a process of its own: it adopts and kills processes by their groups."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]


@pytest.mark.e2e
def test_no_invariant_breaks_under_random_faults() -> None:
    run("tests.faults", *"--seed 5 --faults 14 --requests 280 --minutes 0.4".split(), *PATIENCE)


@pytest.mark.e2e
def test_cancelled_requests_leave_nothing_behind() -> None:
    run("tests.faults.cancels", *"--seed 5 --requests 150".split(), *PATIENCE)


@pytest.mark.e2e
def test_every_process_drains_under_load_and_no_request_fails() -> None:
    run("tests.faults.drains", "--seed", "5", *PATIENCE)
