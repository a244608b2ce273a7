"""`headrace top`: looks at workers and queues, once or again and again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from functools import partial

import msgspec

from headrace.cli.dlq import letters as dead_letters
from headrace.cli.dlq.run import print_line
from headrace.cli.operator_link import connected
from headrace.cli.top.frame import NUM_RUNNING, Frame, Look, Rates, frame
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.queue_look import QueueEye
from headrace.shared.settings import BrokerSettings
from headrace.shared.workers import WorkerTable

ROLL_CALL_S = 1.0  # for every worker to answer, also one that is busy
PLAIN_WIDTH = 160  # columns of a text that goes to no terminal


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
        self._admin = broker.admin
        self._table = table
        self._queues = QueueEye(broker, table, num_taken=NUM_RUNNING)

    async def look(self) -> Look:
        """Return what is to be seen now. Raises: BrokerError when the broker is away."""
        queues = await self._queues.look()
        count = partial(self._admin.num_messages, dead_letters.STREAM)
        return Look(
            time=time.time(),
            beats=self._table.workers(),
            queues=queues,
            num_dead_letters=await self._queues.if_allowed("letters", count),
            sees_messages=queues is not None and self._queues.sees_messages,
        )


def _print(shown: Frame) -> None:
    from rich.console import Console

    from headrace.cli.top.view import view

    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    Console(color_system=None, width=width, highlight=False).print(view(shown))


async def _watch(eye: Eye, rates: Rates, shown: Frame, interval_s: float) -> None:
    from rich.live import Live

    from headrace.cli.top.view import view

    with Live(view(shown), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval_s)
            trouble = ""
            try:
                shown = frame(await eye.look(), rates)
            except BrokerError as error:  # it comes back, and then so does the picture
                trouble = str(error)
            live.update(view(shown, trouble), refresh=True)
