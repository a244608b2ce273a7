"""`make chaos`: random faults under load, from a seed, and then every invariant checked.

Exit code 1 when one of them was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from pathlib import Path

from headrace.cli.process import adopt_orphans

from . import report
from .chaos import Outcome, Plan, run
from .inject import KINDS


def main(words: list[str]) -> int:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="of faults and requests; without it, a new one")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=17.0, help="over which both are spread")
    parser.add_argument("--only", choices=KINDS, nargs="*", default=[], help="kinds of faults")
    parser.add_argument("--patience", type=float, default=1.0, help="above 1 on a slow machine")
    parser.add_argument("--out", type=Path, help="a JSON file for all that was seen")
    options = parser.parse_args(words)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    logging.basicConfig(level=logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    report.say(f"seed {seed}, logs in {folder}")
    adopt_orphans()
    plan = Plan(
        seed=seed,
        num_faults=options.faults,
        num_requests=options.requests,
        storm_s=options.minutes * 60,
        only=tuple(options.only),
        patience=options.patience,
    )
    outcome: Outcome = asyncio.run(run(plan, folder))
    path = options.out or folder / "chaos.json"
    seen = (outcome.records, outcome.faults, outcome.violations, outcome.more)
    report.write(path, seed, *seen)
    for line in report.table(*seen, patience=plan.patience):
        report.say(line)
    report.say(f"seed {seed}: all of it is in {path}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
