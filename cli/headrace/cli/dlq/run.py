"""`headrace dlq`: lists, shows, replays and drops dead letters."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headrace.cli.dlq import letters as dead_letters
from headrace.cli.dlq.letters import STREAM, Letter
from headrace.cli.dlq.replay import NotReplayedError, replay
from headrace.cli.operator_link import connected
from headrace.shared.broker import Broker, DeniedError
from headrace.shared.errors import BrokerError, RequestError, SettingsError
from headrace.shared.settings import BrokerSettings
from headrace.shared.workers import WorkerTable

COLUMNS = ("id", "time", "stage", "num_delivered", "size_bytes", "request_id", "subject", "reason")
HEADINGS = ("ID", "TIME", "STAGE", "TRIES", "BYTES", "REQUEST", "SUBJECT", "REASON")


def run(options: argparse.Namespace, settings: BrokerSettings) -> int:
    """Run one action; 0: all done, 1: some letters stayed. Raises: SettingsError, BrokerError."""
    return asyncio.run(act(options, settings))


async def act(options: argparse.Namespace, settings: BrokerSettings) -> int:
    """Do the same on a running event loop."""
    async with _operator(settings) as broker:
        if options.action == "list":
            await _list(broker, options.stage, as_json=options.json)
            return 0
        if options.action == "show":
            return await _show(broker, options.id, with_payload=options.payload)
        if bool(options.ids) == options.all:
            raise SettingsError("name the dead letters by ID, or say --all")
        if options.stage and not options.all:
            raise SettingsError("--stage goes with --all")
        chosen = await _chosen(broker, options)
        if not chosen:
            return 0
        if not options.yes:
            _confirm(options.action, chosen)
        if options.action == "drop":
            return await _drop(broker, chosen)
        return await _replay(broker, chosen, anew=options.anew)


@asynccontextmanager
async def _operator(settings: BrokerSettings) -> AsyncIterator[Broker]:
    try:
        async with connected(settings) as broker:
            yield broker
    except DeniedError as error:
        raise BrokerError(
            f"only the broker's user admin may read and change dead letters (broker.user, broker.password): {error}"
        ) from None


async def _list(broker: Broker, stage: str | None, *, as_json: bool) -> None:
    rows = [letter.row() async for letter in dead_letters.letters(broker, stage)]
    if as_json:
        _print_json(rows)
    elif not rows:
        print_line("no dead letters")
    else:
        for line in table([HEADINGS, *([row[column] for column in COLUMNS] for row in rows)]):
            print_line(line)


async def _show(broker: Broker, number: int, *, with_payload: bool) -> int:
    letter = await dead_letters.letter(broker, number)
    if letter is None:
        return _missing(number)
    _print_json(letter.details(with_payload=with_payload))
    return 0


async def _chosen(broker: Broker, options: argparse.Namespace) -> list[int]:
    if not options.all:
        return list(dict.fromkeys(options.ids))
    found = [letter.id async for letter in dead_letters.letters(broker, options.stage)]
    if not found:
        print_line("no dead letters")
    return found


def _confirm(action: str, chosen: Sequence[int]) -> None:
    """Raises: SettingsError when the answer is not yes, or nobody can give one."""
    what = f"dead letter {chosen[0]}" if len(chosen) == 1 else f"{len(chosen)} dead letters"
    if not sys.stdin.isatty():
        raise SettingsError(f"to {action} {what} without a terminal, say --yes")
    sys.stderr.write(f"{action} {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SettingsError(f"{action}: not confirmed")


async def _drop(broker: Broker, chosen: Sequence[int]) -> int:
    code = 0
    for number in chosen:
        if await broker.admin.delete(STREAM, number):
            print_line(f"{number} dropped")
        else:
            code = _missing(number)
    return code


async def _replay(broker: Broker, chosen: Sequence[int], *, anew: bool) -> int:
    code = 0
    async with WorkerTable(broker) as table:
        for number in chosen:
            letter = await dead_letters.letter(broker, number)
            if letter is None:
                code = _missing(number)
            elif not await _replay_one(broker, table, letter, anew=anew):
                code = 1
    return code


async def _replay_one(broker: Broker, table: WorkerTable, letter: Letter, *, anew: bool) -> bool:
    try:
        subject = await replay(broker, table, letter, anew=anew)
    except DeniedError:
        raise  # and so would all the others be
    except (NotReplayedError, BrokerError, RequestError) as error:
        sys.stderr.write(f"headrace: {letter.id} not replayed: {printable(str(error))}\n")
        return False
    print_line(f"{letter.id} replayed on {printable(subject)}")
    return True


def _missing(number: int) -> int:
    sys.stderr.write(f"headrace: there is no dead letter {number}\n")
    return 1


def table(rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return lines in which the columns stand under one another."""
    texts = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]


def printable(text: str) -> str:
    """Return text that does nothing to a terminal: what was put aside may have come from anybody."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def print_line(line: str) -> None:
    """Write one line to stdout."""
    sys.stdout.write(f"{line}\n")


def _print_json(value: Any) -> None:
    print_line(json.dumps(value, indent=2))  # ASCII: no character of it moves a cursor
