"""A thousand cancels at random moments, and nothing else wrong: what they held must be free at once.

`python -m tests.faults.cancels --seed N --requests 1000`
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cli.process import adopt_orphans
from headrace.shared.broker import Broker
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role
from headrace.shared.workers import WorkerTable

from . import check, logs, quiet, report
from .check import Violation
from .load import Load
from .nats_client import NatsClient
from .orders import Order, made_of
from .stack import Stack, running
from .terminals import Terminals, stage_of

FREE_S = 1.0
MAX_OPEN = 24
LEASE_S = 120.0  # so that no block comes back because its lease ran out
# Fewer slots than requests, and prompts that take a while: cancels find them at every stage.
PRESETS: dict[str, dict[str, Any]] = {
    "render": {"slots": 2},
    "decode": {"slots": 8, "local_prefill_threshold": 400},
    "prefill": {"slots": 2},
    "nixl": {"lease_s": LEASE_S},
    "fake": {"prefill_s_per_1k": 0.4},
}
WAYS = {"leave": 35, "cancel": 35, "deadline": 15, "stop": 15}


def make(seed: int, patience: float, number: int) -> Order:
    """Return an order that does not come to its own end."""
    rng = random.Random(f"{seed}/cancel/{number}")
    (way,) = rng.choices(list(WAYS), list(WAYS.values()))
    kind = "stop" if way == "stop" else "endless"
    order = made_of(rng, kind, number, num_words=int(2 ** rng.uniform(0, 8.5)))
    over_nats = way == "cancel" and rng.random() < 0.3
    order = replace(
        order,
        way="nats" if over_nats else "http",
        lane=rng.choice([Lane.STD, Lane.BULK]) if over_nats else Lane.RT,
        after_events=rng.choice([None, rng.randrange(0, 60)]),
        after_s=rng.uniform(0.0 if way == "leave" else 0.3, 1.4),
    )
    if way == "stop":
        return order
    timeout_s = rng.uniform(0.05, 1.2) if way == "deadline" else 60.0 * patience
    return replace(order, ending=way, timeout_s=timeout_s)  # type: ignore[arg-type]  # an Ending


async def run(
    seed: int, num: int, patience: float, folder: Path
) -> tuple[list[str], list[Violation]]:
    """Run it; return the lines to print, and what was violated."""
    async with running(folder, presets=PRESETS) as stack:
        broker = await Broker.connect(
            BrokerSettings(url=stack.broker.url), role="test", name="harness"
        )
        try:
            async with WorkerTable(broker) as table:
                lines, violations = await _run(seed, num, patience, stack, broker, table)
        finally:
            await broker.close()
    counts, found = logs.read(member.log for member in stack.members)
    lines.append(f"logged     {dict(counts.most_common())}")
    ends = [exit for member in stack.members for exit in member.exits]
    return lines, violations + found + check.check_exits((), {e.name: e.code for e in ends})


async def _run(
    seed: int, num: int, patience: float, stack: Stack, broker: Broker, table: WorkerTable
) -> tuple[list[str], list[Violation]]:
    terminals = Terminals()
    await terminals.start(broker)
    nats = NatsClient(broker)
    await nats.start()
    load = Load(partial(make, seed, patience), stack.of(Role.GATEWAY), nats, max_open=MAX_OPEN)
    started = time.monotonic()
    stack.sample()
    await load.run(num, 1000.0)
    await load.finish()
    freed_s, violations = await quiet.check_engines(
        broker, table, num=8, lease_s=LEASE_S, within_s=FREE_S * patience
    )
    wall_s = time.monotonic() - started
    stack.sample()
    violations += await quiet.check_queues(broker)
    violations += await quiet.check_dead_letters(broker, num_wanted=0)
    violations += check.check_requests(load.records, [], patience=patience)
    violations += [
        Violation("cancel_lost", record.request_id, "cancelled, and ended well all the same")
        for record in load.records
        if record.order.ending == "cancel" and record.end == "ok"
    ]
    violations += [Violation("harness", "", text) for text in load.failures]
    stages = Counter(
        stage_of(terminals.timings[record.request_id])
        for record in load.records
        if record.end != "ok" and record.request_id in terminals.timings
    )
    ends = Counter(f"{r.order.ending} {r.order.kind} {r.end} {r.http_status}" for r in load.records)
    lines = [
        f"requests   {len(load.records)} in {wall_s:.0f} s",
        *(f"  {count:6d} {what}" for what, count in sorted(ends.items())),
        "cancelled while",
        *(f"  {count:6d} {what}" for what, count in stages.most_common()),
        f"freed      {'never' if freed_s is None else f'{freed_s:.2f} s'} after the last end",
        *_growth(stack),
    ]
    return lines, violations


def _growth(stack: Stack) -> list[str]:
    lines = []
    for member in stack.members:
        (_, rss, files), (_, rss_after, files_after) = member.lives[-1].samples
        grown = (rss_after - rss) / 2**20
        lines.append(f"  {member.name:10s} {grown:+6.1f} MiB, files {files} then {files_after}")
    return lines


def main(words: list[str]) -> int:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cancels", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--patience", type=float, default=1.0, help="above 1 on a slow machine")
    options = parser.parse_args(words)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    logging.basicConfig(level=logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="cancels-"))
    report.say(f"seed {seed}, logs in {folder}")
    adopt_orphans()
    lines, violations = asyncio.run(run(seed, options.requests, options.patience, folder))
    for line in [*lines, *report.violation_lines(violations)]:
        report.say(line)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
