"""A batch under kill -9 of every process and of the broker: one right result a line, and nothing run again.

`python -m tests.faults.batch --lines 20000 --kills 50`; with `--run` it is `headrace batch run` that is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.cli.process import adopt_orphans
from headrace.shared.broker import Broker
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role

from .batch_lines import check_files, make_lines
from .batch_rides import Ride, RunRide, ServiceRide
from .check import Violation
from .report import say, violation_lines
from .runs import Runs
from .stack import ROLES, Stack, running

TENANT = "default"
POLL_S = 0.2
SAY_S = 10.0
BROKER_SHARE = 0.1  # of the kills
LATEST_S = 3_600.0  # only when all is lost
PRESETS: dict[str, dict[str, Any]] = {"batch": {"drain_timeout_s": 10}}


async def run(options: argparse.Namespace, seed: int, folder: Path) -> list[Violation]:
    """Run it all; `folder` takes logs, files and the broker's store."""
    rng = random.Random(seed)
    lines = make_lines(rng, options.lines)
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    roles = (Role.GATEWAY, Role.BATCH, *ROLES[1:])
    async with running(folder, presets=PRESETS, roles=roles) as stack:
        broker = await Broker.connect(
            BrokerSettings(url=stack.broker.url), role="test", name="harness"
        )
        runs = Runs(broker)
        await runs.start()
        try:
            ride: Ride = RunRide(stack, source) if options.run else ServiceRide(stack, source)
            started = time.monotonic()
            await ride.start()
            killed = await _kill(rng, ride, stack, options)
            output, errors = await ride.finish()
            seconds = time.monotonic() - started
            say(f"{len(lines)} lines in {seconds:.0f} s: {len(lines) / seconds:.1f} a second")
            say(f"killed: {', '.join(f'{name} {num}' for name, num in sorted(killed.items()))}")
            say(f"begun {runs.num_started} times, as far as was heard; {ride.summary}")
            say(f"largest batch worker: {_largest(stack) / 2**20:.0f} MiB")
            return [*check_files(lines, output, errors), *await runs.check(TENANT)]
        finally:
            await broker.close()


async def _kill(
    rng: random.Random, ride: Ride, stack: Stack, options: argparse.Namespace
) -> dict[str, int]:
    """Kill something each time another part of the lines is done; return what, and how often."""
    killed: dict[str, int] = {}
    told = time.monotonic()
    async with asyncio.timeout(LATEST_S):
        while True:
            num_done, is_over = await ride.progress()
            num_kills = sum(killed.values())
            if time.monotonic() - told > SAY_S:
                told = time.monotonic()
                stack.sample()
                say(f"{num_done} of {options.lines} lines, {num_kills} kills")
            if is_over:
                return killed
            if (
                num_kills < options.kills
                and num_done * (options.kills + 1) > num_kills * options.lines
            ):
                name = await _kill_one(rng, ride, stack)
                killed[name] = killed.get(name, 0) + 1
            await asyncio.sleep(POLL_S)


async def _kill_one(rng: random.Random, ride: Ride, stack: Stack) -> str:
    if ride.process is not None:
        await ride.kill()
        return "batch run"
    if rng.random() < BROKER_SHARE:
        stack.broker.kill()
        await asyncio.sleep(rng.uniform(0, 2))
        await stack.broker.start()
        return "broker"
    member = rng.choice(stack.members)
    member.signal(signal.SIGKILL)
    return str(member.role)


def _largest(stack: Stack) -> int:
    lives = (life for member in stack.of(Role.BATCH) for life in member.lives)
    return max((rss for life in lives for _, rss, _ in life.samples), default=0)


def main(words: list[str]) -> int:
    """Run it and print what came of it; 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.batch", description=__doc__)
    parser.add_argument("--seed", type=int, help="without it, a new one")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--run", action="store_true", help="kill `headrace batch run` itself")
    options = parser.parse_args(words)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    logging.basicConfig(level=logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="chaos-batch-"))
    say(f"seed {seed}, logs in {folder}")
    adopt_orphans()
    violations = asyncio.run(run(options, seed, folder))
    for line in violation_lines(violations):
        say(line)
    say(f"seed {seed}: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
