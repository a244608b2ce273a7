"""`headrace batch submit|status|cancel|results|list`: batches that a gateway runs, however long it takes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headrace.cli.batch.gateway import Gateway, GatewayError
from headrace.cli.dlq.run import print_line, printable, table
from headrace.shared.batches import OVER
from headrace.shared.errors import SettingsError

POLL_S = 1.0
MAX_LOST_S = 300.0  # a batch goes on without the gateway that is asked for it
COLUMNS = ("id", "status", "done", "failed", "total", "endpoint")
HEADINGS = ("ID", "STATUS", "OK", "FAILED", "LINES", "ENDPOINT")


def run(options: argparse.Namespace) -> int:
    """Run one action; 0: all well, 1: the batch is over without all of it done. Raises: SettingsError, GatewayError."""
    with closing(Gateway(options.base_url, options.api_key)) as gateway:
        return ACTIONS[options.action](gateway, options)


def submit(gateway: Gateway, options: argparse.Namespace) -> int:
    """Send a file, make a batch of it, and print its ID, which alone is on stdout."""
    endpoint = options.endpoint or _endpoint_of(options.input_file)
    file = gateway.upload(options.input_file)
    wanted = {
        "input_file_id": file["id"],
        "endpoint": endpoint,
        "completion_window": options.completion_window,
        "metadata": _metadata(options.metadata) or None,
    }
    batch = gateway.create(wanted)
    print_line(batch["id"])
    return follow(gateway, batch["id"]) if options.follow else 0


def status(gateway: Gateway, options: argparse.Namespace) -> int:
    """Print how far a batch is."""
    if options.follow:
        return follow(gateway, options.id)
    batch = gateway.batch(options.id)
    if options.json:
        print_line(msgspec.json.format(msgspec.json.encode(batch)).decode())
    else:
        print_line(f"{batch['id']}  {_words(batch)}")
        _print_errors(batch)
    return _code(batch)


def follow(gateway: Gateway, batch_id: str) -> int:
    """Show how far a batch is until it is over; a gateway that is away for a while is asked again."""
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    shown = ""
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("", total=None, text="")
        while True:
            batch = _patiently(lambda: gateway.batch(batch_id))
            done, total = _done(batch)
            progress.update(task, completed=done, total=total or None, text=_words(batch))
            if not sys.stderr.isatty() and _words(batch) != shown:
                sys.stderr.write(f"{printable(_words(batch))}\n")
            shown = _words(batch)
            if batch["status"] in OVER:
                break
            time.sleep(POLL_S)
    print_line(f"{batch['id']}  {_words(batch)}")
    _print_errors(batch)
    return _code(batch)


def cancel(gateway: Gateway, options: argparse.Namespace) -> int:
    """Cancel a batch."""
    batch = gateway.cancel(options.id)
    print_line(f"{batch['id']}  {_words(batch)}")
    return 0


def results(gateway: Gateway, options: argparse.Namespace) -> int:
    """Write the results of a batch, those that are there already if it still runs."""
    if options.output_file is None and options.errors is None:
        raise SettingsError("say where to: --output-file, --errors, or both")
    batch = gateway.batch(options.id)
    wanted = (
        (batch["output_file_id"], options.output_file),
        (batch["error_file_id"], options.errors),
    )
    for file_id, path in wanted:
        if path is None:
            continue
        if file_id is None:
            sys.stderr.write(f"headrace: nothing for {path} yet: {printable(_words(batch))}\n")
        elif str(path) == "-":
            gateway.download(file_id, sys.stdout.buffer)
            sys.stdout.flush()
        else:
            _download(gateway, file_id, path)
    return _code(batch)


def show_all(gateway: Gateway, options: argparse.Namespace) -> int:
    """List the newest batches."""
    rows = []
    for batch in gateway.batches(options.limit):
        counts = batch["request_counts"] or {}
        numbers = (counts.get(name, 0) for name in ("completed", "failed", "total"))
        rows.append((batch["id"], batch["status"], *numbers, batch["endpoint"]))
    if not rows:
        print_line("no batches")
    else:
        for line in table([HEADINGS, *rows]):
            print_line(line)
    return 0


ACTIONS: Mapping[str, Callable[[Gateway, argparse.Namespace], int]] = {
    "submit": submit,
    "status": status,
    "cancel": cancel,
    "results": results,
    "list": show_all,
}


def _patiently(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    end = time.monotonic() + MAX_LOST_S
    while True:
        try:
            return ask()
        except GatewayError as error:
            if not error.is_passing or time.monotonic() >= end:
                raise
        time.sleep(POLL_S)


def _download(gateway: Gateway, file_id: str, path: Path) -> None:
    """Write beside the file and rename: what stands under its name is whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as target:
            num_bytes = gateway.download(file_id, target)
        os.replace(part, path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    sys.stderr.write(f"{num_bytes:,} bytes in {path}\n")


def _endpoint_of(path: Path) -> str:
    """Return what the first line asks for. Raises: SettingsError when it does not say so."""
    try:
        with path.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
        return str(msgspec.json.decode(first)["url"])
    except OSError as error:
        raise SettingsError(f"--input-file {path}: {error.strerror}") from None
    except (msgspec.DecodeError, KeyError, TypeError):
        raise SettingsError(f"the first line of {path} has no url: say --endpoint") from None


def _metadata(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"--metadata must be KEY=VALUE, got {pair!r}")
        found[name] = value
    return found


def _done(batch: Mapping[str, Any]) -> tuple[int, int]:
    counts = batch["request_counts"] or {}
    done = counts.get("completed", 0) + counts.get("failed", 0)
    return done, counts.get("total", 0)


def _words(batch: Mapping[str, Any]) -> str:
    done, total = _done(batch)
    failed = (batch["request_counts"] or {}).get("failed", 0)
    words = f"{batch['status']}, {done:,} of {total:,} lines, {failed:,} failed"
    usage = batch.get("usage")
    return words + (f", {usage['output_tokens']:,} tokens" if usage else "")


def _print_errors(batch: Mapping[str, Any]) -> None:
    for error in (batch["errors"] or {}).get("data", ()):
        where = f"line {error['line']}: " if error.get("line") else ""
        sys.stderr.write(f"  {where}{printable(error['message'])}\n")


def _code(batch: Mapping[str, Any]) -> int:
    failed = (batch["request_counts"] or {}).get("failed", 0)
    is_bad = batch["status"] in OVER - {"completed"} or (batch["status"] in OVER and failed > 0)
    return int(is_bad)
