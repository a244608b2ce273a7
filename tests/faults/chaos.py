"""One run: a stack, load and faults on it, a calm, and then every check."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.shared.broker import Broker
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from . import check, logs, quiet
from .check import Violation
from .inject import Fault, Injector
from .load import Load
from .nats_client import NatsClient
from .orders import make
from .record import Record
from .report import progress, say
from .stack import PRESETS, Stack, running
from .terminals import Terminals

SAMPLE_S = 10.0
TICK_S = 0.5
STALL_S = 2.0  # without a tick for so much longer: not load, but a machine that stood still


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does."""

    seed: int
    num_faults: int
    num_requests: int
    storm_s: float  #: how long the faults are spread over
    calm_s: float = 14.0  #: of load without faults behind them; longer than a lease
    max_open: int = 32
    only: tuple[str, ...] = ()  #: kinds of faults; empty: all
    patience: float = 1.0  #: how many times longer than on an idle machine things may take


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


async def run(plan: Plan, folder: Path) -> Outcome:
    """Run it all; `folder` takes logs and the broker's store."""
    outcome = Outcome()
    async with running(folder) as stack:
        broker = await Broker.connect(
            BrokerSettings(url=stack.broker.url), role="test", name="harness"
        )
        try:
            async with WorkerTable(broker) as table:
                await _run(plan, stack, broker, table, outcome)
        finally:
            await broker.close()
    last = {exit.name: exit.code for m in stack.members for exit in m.exits[-1:]}
    exits = [exit for member in stack.members for exit in member.exits[:-1]]
    outcome.violations += check.check_exits(exits, last)
    outcome.violations += check.check_growth(life for m in stack.members for life in m.lives)
    counts, found = logs.read(member.log for member in stack.members)
    outcome.violations += found
    outcome.more["logged"] = dict(counts.most_common())
    return outcome


async def _run(
    plan: Plan, stack: Stack, broker: Broker, table: WorkerTable, outcome: Outcome
) -> None:
    terminals = Terminals()
    await terminals.start(broker)
    nats = NatsClient(broker)
    await nats.start()
    orders = partial(make, plan.seed, patience=plan.patience)
    load = Load(orders, stack.of(Role.GATEWAY), nats, max_open=plan.max_open)
    injector = Injector(plan.seed, stack, broker, table)
    outcome.records, outcome.faults = load.records, injector.faults
    started = time.monotonic()
    loads: list[float] = []

    def line() -> str:
        loads.append(os.getloadavg()[0])
        return progress(load.records, injector.faults, load.num_open)

    async with _telling(stack, line), _watching(injector.faults):
        per_s = plan.num_requests / plan.storm_s
        loading = asyncio.create_task(load.run(plan.num_requests, per_s))
        gap_s = plan.storm_s / plan.num_faults if plan.num_faults else 0.0
        await injector.run(plan.num_faults, gap_s, only=plan.only)
        await injector.heal()
        say("the faults are over")
        await loading
        await load.run(int(plan.calm_s * per_s), per_s)
        await load.finish()
    freed_s, leaked = await quiet.check_engines(
        broker,
        table,
        num=8,
        lease_s=float(PRESETS["nixl"]["lease_s"]),
        within_s=check.FREE_S * plan.patience,
    )
    outcome.more["wall"] = f"{time.monotonic() - started:.0f} s"
    outcome.more["freed"] = "never" if freed_s is None else f"{freed_s:.2f} s after the last end"
    if loads:
        outcome.more["load"] = (
            f"{sum(loads) / len(loads):.1f} processes on {os.cpu_count()} cores, at most {max(loads):.1f}"
        )
    outcome.violations += leaked
    outcome.violations += await quiet.check_queues(broker)
    outcome.violations += await quiet.check_dead_letters(broker, num_wanted=injector.num_poisoned)
    outcome.violations += check.check_requests(
        load.records, injector.faults, patience=plan.patience
    )
    again = await quiet.read_results(nats, load.records)
    outcome.violations += check.check_results(load.records, again)
    await terminals.settle()
    outcome.more["void ends"] = f"{terminals.num_void}, of owners whose job was taken over"
    outcome.violations += check.check_terminals(terminals.ends)
    own = [*injector.failures, *load.failures]
    outcome.violations += [Violation("harness", "", text) for text in own]


@contextlib.asynccontextmanager
async def _watching(faults: list[Fault]) -> AsyncIterator[None]:
    """Add a fault that nobody injected: the machine stood still, and every clock in it ran on."""

    async def watch() -> None:
        before = time.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.time()
            if now - before > TICK_S + STALL_S:
                faults.append(Fault(-1, "stall", "machine", f"{now - before:.1f} s", before, now))
            before = now

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _telling(stack: Stack, line: Callable[[], str]) -> AsyncIterator[None]:
    async def tell() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            stack.sample()
            say(line())

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
