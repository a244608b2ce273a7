"""Faults at random, from a seed: processes die, hang and end, the broker too, messages get lost or come twice."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.shared.broker import Broker
from headrace.shared.subjects import ROOT, Role
from headrace.shared.workers import WorkerTable

from . import message_faults
from .member import Member
from .proxy import Rule
from .stack import Stack

KINDS = {
    "kill": 30,
    "stop": 22,
    "term": 10,
    "broker_kill": 4,
    "broker_stop": 4,
    "drop": 8,
    "repeat": 6,
    "delay": 6,
    "cut": 4,
    "replay": 4,
    "slow_reader": 2,
    "poison": 2,
}
ROLES = {Role.DECODE: 30, Role.PREFILL: 22, Role.DERENDER: 22, Role.RENDER: 14, Role.GATEWAY: 12}
STOP_S = (0.2, 15.0)
LOSSY = (f"{ROOT}.frames.", f"{ROOT}.ctl.worker.", f"{ROOT}.kv.", f"{ROOT}.out.", f"{ROOT}.ctl.")
RECONNECT_S = 1.0


@dataclass(slots=True)
class Fault:
    """One fault. Times are Unix seconds."""

    number: int
    kind: str
    target: str  #: a process, or "broker"
    detail: str
    started: float
    healed: float | None = None  #: None: not yet


class Injector:
    """Injects the faults of a seed, some of them at the same time."""

    def __init__(self, seed: int, stack: Stack, broker: Broker, table: WorkerTable) -> None:
        self.faults: list[Fault] = []
        self.num_poisoned = 0  #: messages that must end as dead letters
        self.failures: list[str] = []  #: processes that did not come back
        self._seed = seed
        self._stack = stack
        self._broker = broker
        self._table = table
        self._tasks: set[asyncio.Task[None]] = set()
        self._broker_lock = asyncio.Lock()
        self._freed = asyncio.Event()  #: a process is no longer busy
        self._kinds: dict[str, Callable[[random.Random, int], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "term": self._term,
            "broker_kill": self._broker_kill,
            "broker_stop": self._broker_stop,
            "drop": lambda rng, n: self._messages(rng, n, "drop"),
            "repeat": lambda rng, n: self._messages(rng, n, "repeat"),
            "delay": lambda rng, n: self._messages(rng, n, "delay"),
            "cut": self._cut,
            "replay": self._replay,
            "slow_reader": self._slow_reader,
            "poison": self._poison,
        }

    async def run(self, num: int, mean_gap_s: float, *, only: tuple[str, ...] = ()) -> None:
        """Inject `num` faults; returns when the last one has begun."""
        weights = {kind: KINDS[kind] for kind in only or KINDS}
        for number in range(num):
            rng = random.Random(f"{self._seed}/fault/{number}")
            await asyncio.sleep(min(rng.expovariate(1 / mean_gap_s), 4 * mean_gap_s))
            (kind,) = rng.choices(list(weights), list(weights.values()))
            task = asyncio.create_task(self._kinds[kind](rng, number), name=f"fault {number}")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def heal(self) -> None:
        """Wait until every fault is over and every process is ready again."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(member.ready() for member in self._stack.members))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(f"{task.get_name()} did not heal: {error!r}")

    @contextlib.contextmanager
    def _fault(self, number: int, kind: str, target: str, detail: str = "") -> Iterator[Fault]:
        fault = Fault(number, kind, target, detail, time.time())
        self.faults.append(fault)
        try:
            yield fault
        finally:
            fault.healed = time.time()

    @contextlib.asynccontextmanager
    async def _target(self, rng: random.Random) -> AsyncIterator[Member]:
        """Give a process that no other fault has in hand."""
        (role,) = rng.choices(list(ROLES), list(ROLES.values()))
        members = self._stack.of(role)
        first = rng.randrange(len(members))
        order = members[first:] + members[:first]
        while (member := next((m for m in order if not m.is_busy), None)) is None:
            self._freed.clear()
            await self._freed.wait()
        member.is_busy = True
        try:
            yield member
        finally:
            member.is_busy = False
            self._freed.set()

    async def _kill(self, rng: random.Random, number: int) -> None:
        async with self._target(rng) as member:
            with self._fault(number, "kill", member.name):
                await self._end(member, signal.SIGKILL)

    async def _term(self, rng: random.Random, number: int) -> None:
        async with self._target(rng) as member:
            with self._fault(number, "term", member.name):
                await self._end(member, signal.SIGTERM)

    async def _end(self, member: Member, number: signal.Signals) -> None:
        await member.ready()
        await member.end_life(number)
        await member.ready()

    async def _stop(self, rng: random.Random, number: int) -> None:
        seconds = log_uniform(rng, *STOP_S)
        async with self._target(rng) as member:
            with self._fault(number, "stop", member.name, f"{seconds:.1f} s"):
                member.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                member.signal(signal.SIGCONT)

    async def _broker_kill(self, rng: random.Random, number: int) -> None:
        seconds = log_uniform(rng, 0.1, 4.0)
        async with self._broker_lock:
            with self._fault(number, "broker_kill", "broker", f"{seconds:.1f} s"):
                self._stack.broker.kill()
                await asyncio.sleep(seconds)
                await self._stack.broker.start()
                await asyncio.sleep(RECONNECT_S)

    async def _broker_stop(self, rng: random.Random, number: int) -> None:
        seconds = log_uniform(rng, *STOP_S)
        async with self._broker_lock:
            with self._fault(number, "broker_stop", "broker", f"{seconds:.1f} s"):
                self._stack.broker.pause()
                await asyncio.sleep(seconds)
                self._stack.broker.resume()
                await asyncio.sleep(RECONNECT_S)

    def _behind_proxy(self, rng: random.Random) -> Member:
        return rng.choice([member for member in self._stack.members if member.proxy is not None])

    async def _messages(self, rng: random.Random, number: int, action: str) -> None:
        member = self._behind_proxy(rng)
        seconds = rng.uniform(1.0, 4.0)
        prefix = rng.choice(LOSSY)
        rule = Rule(
            action=action,  # type: ignore[arg-type]  # one of the three
            prefix=prefix,
            # One of an answer gets lost behind the broker alone (a slow reader); on its way there, only
            # with the connection, and then its sender knows.
            only_in=action == "drop" and prefix == LOSSY[3],
            count=rng.randrange(1, 40),
            share=rng.choice([0.1, 0.5, 1.0]),
            delay_s=log_uniform(rng, 0.02, 2.0),
            until=time.monotonic() + seconds,
        )
        with self._fault(number, action, member.name, f"{rule.count} of {rule.prefix}*") as fault:
            assert member.proxy is not None
            member.proxy.add(rule, number)
            await asyncio.sleep(seconds + (rule.delay_s if action == "delay" else 0.0))
            fault.detail += f": {rule.num_hit} hit"

    async def _cut(self, rng: random.Random, number: int) -> None:
        member = self._behind_proxy(rng)
        seconds = log_uniform(rng, 0.05, 5.0)
        with self._fault(number, "cut", member.name, f"{seconds:.1f} s"):
            assert member.proxy is not None
            member.proxy.cut()
            await asyncio.sleep(seconds)
            member.proxy.let_in()
            await asyncio.sleep(RECONNECT_S)

    async def _replay(self, rng: random.Random, number: int) -> None:
        wait_s = log_uniform(rng, 0.05, 5.0)
        with self._fault(number, "replay", "messages") as fault:
            num = await message_faults.replay(self._broker, rng, wait_s)
            fault.detail = f"{num} after {wait_s:.1f} s"

    async def _poison(self, rng: random.Random, number: int) -> None:
        with self._fault(number, "poison", "messages") as fault:
            name = f"{self._seed}.{number}"
            num = await message_faults.poison(self._broker, self._table, rng, name)
            self.num_poisoned += num
            fault.detail = f"{num}"

    async def _slow_reader(self, rng: random.Random, number: int) -> None:
        seconds = rng.uniform(2.0, 8.0)
        with self._fault(number, "slow_reader", "broker", f"{seconds:.1f} s"):
            await message_faults.read_slowly(self._stack.broker.port, seconds)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Return a number between the two, as often near the one as near the other."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))
