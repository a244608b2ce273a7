"""SIGTERM to every process in turn, under load: each ends with code 0, and no request fails.

`python -m tests.faults.drains --seed N`
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from headrace.cli.process import adopt_orphans
from headrace.shared.broker import Broker
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from . import check, logs, quiet, report
from .check import Violation
from .inject import Fault
from .load import Load
from .nats_client import NatsClient
from .orders import Order, make
from .stack import PRESETS, Stack, running
from .terminals import Terminals

PER_S = 12.0
NUM_BETWEEN = 12  # requests that end before the next process is told to
MAX_REQUESTS = 100_000


def to_its_end(seed: int, patience: float, number: int) -> Order:
    """Return an order whose client waits for its end: none may fail."""
    steps = itertools.count(0, 1_000_003)
    orders = (make(seed + step, number, patience=patience) for step in steps)
    return next(order for order in orders if order.ending == "read")


async def run(seed: int, patience: float, folder: Path) -> tuple[list[str], list[Violation]]:
    """Run it; return the lines to print, and what was violated."""
    async with running(folder) as stack:
        broker = await Broker.connect(
            BrokerSettings(url=stack.broker.url), role="test", name="harness"
        )
        try:
            async with WorkerTable(broker) as table:
                lines, violations = await _run(seed, patience, stack, broker, table)
        finally:
            await broker.close()
    counts, found = logs.read(member.log for member in stack.members)
    lines.append(f"logged     {dict(counts.most_common())}")
    violations += [
        Violation("died", "", f"{exit.name} drained with exit code {exit.code}")
        for member in stack.members
        for exit in member.exits
        if exit.code != 0
    ]
    return lines, violations + found


async def _run(
    seed: int, patience: float, stack: Stack, broker: Broker, table: WorkerTable
) -> tuple[list[str], list[Violation]]:
    terminals = Terminals()
    await terminals.start(broker)
    nats = NatsClient(broker)
    await nats.start()
    load = Load(partial(to_its_end, seed, patience), stack.of(Role.GATEWAY), nats)
    over = asyncio.Event()
    loading = asyncio.create_task(load.run(MAX_REQUESTS, PER_S, until=over.is_set))
    lines, refusing = [], []
    for number, member in enumerate(stack.members):
        await load.more_done(NUM_BETWEEN)
        drain = Fault(number, "term", member.name, "", time.time())
        if member.role is Role.GATEWAY:  # of all processes, this alone may refuse, and only then
            refusing.append(drain)
        await member.end_life(signal.SIGTERM)
        lines.append(f"  {member.name:10s} drained in {time.time() - drain.started:.1f} s")
        await member.ready()
        drain.healed = time.time()
    over.set()
    await loading
    await load.finish()
    _, violations = await quiet.check_engines(
        broker,
        table,
        num=8,
        lease_s=float(PRESETS["nixl"]["lease_s"]),
        within_s=check.FREE_S * patience,
    )
    violations += await quiet.check_queues(broker)
    violations += await quiet.check_dead_letters(broker, num_wanted=0)
    violations += check.check_requests(load.records, refusing, patience=patience)
    violations += check.check_terminals(terminals.ends)
    violations += [Violation("harness", "", text) for text in load.failures]
    ends = Counter(f"{r.order.way} {r.order.kind} {r.end}" for r in load.records)
    return [*lines, *(f"  {count:6d} {what}" for what, count in sorted(ends.items()))], violations


def main(words: list[str]) -> int:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.drains", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--patience", type=float, default=1.0, help="above 1 on a slow machine")
    options = parser.parse_args(words)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    logging.basicConfig(level=logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="drains-"))
    report.say(f"seed {seed}, logs in {folder}")
    adopt_orphans()
    lines, violations = asyncio.run(run(seed, options.patience, folder))
    for line in [*lines, *report.violation_lines(violations)]:
        report.say(line)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
