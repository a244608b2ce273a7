"""`headrace top`: looks at workers and queues, once or again and again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from headrace.cli import dead_letters
from headrace.cli.dlq import print_line
from headrace.cli.operator_link import connected
from headrace.cli.top_frame import NUM_RUNNING, Frame, Look, Queue, Rates, frame
from headrace.shared.broker import Broker, DeniedError, QueueInfo, WorkQueue
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.settings import BrokerSettings
from headrace.shared.workers import WorkerTable

STREAMS = sorted({queue.stream for queue in WorkQueue.of_model("-", "-")})
ROLL_CALL_S = 1.0  # for every worker to answer, also one that is busy
PLAIN_WIDTH = 160  # columns of a text that goes to no terminal

T = TypeVar("T")


def run(options: argparse.Namespace, settings: BrokerSettings) -> int:
    """Show what there is, until Ctrl-C or once. Raises: BrokerError, SettingsError."""
    if not (options.once or options.json or sys.stdout.isatty()):
        raise SettingsError("the output is no terminal: say --once or --json")
    try:
        asyncio.run(show(options, settings))
    except KeyboardInterrupt:  # that is how it ends
        pass
    return 0


async def show(options: argparse.Namespace, settings: BrokerSettings) -> None:
    """Do the same on a running event loop."""
    async with connected(settings) as broker, WorkerTable(broker) as table:
        await asyncio.sleep(ROLL_CALL_S)
        eye, rates = Eye(broker, table), Rates()
        first = frame(await eye.look(), rates)
        if options.json:
            print_line(json.dumps(msgspec.to_builtins(first), indent=2))
        elif options.once:
            _print(first)
        else:
            await _watch(eye, rates, first, options.interval)


class Eye:
    """Looks at a stack with the rights that its user has."""

    def __init__(self, broker: Broker, table: WorkerTable) -> None:
        self._broker = broker
        self._table = table
        self._denied: set[str] = set()

    async def look(self) -> Look:
        """Return what is to be seen now. Raises: BrokerError when the broker is away."""
        admin = self._broker.admin
        queues: list[Queue] = []
        may_know = False
        for stream in STREAMS:
            infos = await self._if_allowed(stream, partial(admin.queues, stream))
            may_know |= infos is not None
            queues += [await self._queue(stream, info) for info in infos or ()]
        num = await self._if_allowed("letters", partial(admin.num_messages, dead_letters.STREAM))
        return Look(
            time=time.time(),
            beats=self._table.workers(),
            queues=queues if may_know else None,
            num_dead_letters=num,
            sees_messages=may_know and "messages" not in self._denied,
        )

    async def _queue(self, stream: str, info: QueueInfo) -> Queue:
        seen = await self._if_allowed("messages", partial(self._glance, stream, info))
        return Queue(info=info) if seen is None else seen

    async def _glance(self, stream: str, info: QueueInfo) -> Queue:
        admin, pattern = self._broker.admin, info.filter_subject
        oldest, taken = [], []
        if info.num_waiting:
            oldest = await admin.first(stream, pattern, first_seq=info.last_delivered + 1)
        if info.num_taken and stream.startswith("HR_JOB"):
            taken = await admin.first(stream, pattern, num=NUM_RUNNING)
        return Queue(
            info=info,
            oldest=oldest[0] if oldest else None,
            first_taken=[kept for kept in taken if kept.sequence <= info.last_delivered],
        )

    async def _if_allowed(self, what: str, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Return the answer, or None where this user may not ask; then it is asked no more."""
        if what in self._denied:
            return None
        try:
            return await ask()
        except DeniedError:
            self._denied.add(what)
            return None


def _print(shown: Frame) -> None:
    from rich.console import Console

    from headrace.cli.top_view import view

    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    Console(color_system=None, width=width, highlight=False).print(view(shown))


async def _watch(eye: Eye, rates: Rates, shown: Frame, interval_s: float) -> None:
    from rich.live import Live

    from headrace.cli.top_view import view

    with Live(view(shown), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval_s)
            trouble = ""
            try:
                shown = frame(await eye.look(), rates)
            except BrokerError as error:  # it comes back, and then so does the picture
                trouble = str(error)
            live.update(view(shown, trouble), refresh=True)
