"""The arguments of `headrace batch`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

from headrace.cli import arguments
from headrace.cli.batch.transfer import place

DEFAULT_URL = "http://127.0.0.1:8000"
Actions: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: of the stack that `--local` starts; the broker is that of the stack which runs already
FLAGS = {flag: key for flag, key in arguments.STACK_FLAGS.items() if key != "up.nats_url"}
FLAGS["--nats-url"] = "broker.url"


def add_batch(batch: argparse.ArgumentParser) -> tuple[argparse.ArgumentParser, Actions]:
    """Add `headrace batch run`; return its parser, and where the other actions go (`add_remote`)."""
    actions = batch.add_subparsers(required=True, metavar="ACTION")
    sentence = "Run the requests of a file and write their results to another, as `vllm run-batch`."
    run = actions.add_parser("run", help=sentence, description=sentence, allow_abbrev=False)
    run.add_argument(
        *("-i", "--input-file"),
        type=place,
        required=True,
        metavar="FILE",
        help="one request a line; an http(s) URL is read first",
    )
    run.add_argument(
        *("-o", "--output-file"),
        type=place,
        required=True,
        metavar="FILE",
        help="one result a line, as they come; what stands in it already is not run again. "
        "To an http(s) URL all is sent at the end, with PUT",
    )
    run.add_argument(
        "--local",
        action="store_true",
        help="start a stack for the time of the run, on this machine",
    )
    run.add_argument(
        "--retry-failed", action="store_true", help="run those again whose result is an error"
    )
    run.add_argument(
        "--concurrency",
        type=_positive,
        metavar="NUMBER",
        help="requests under way; without it, twice the slots of the decode workers",
    )
    run.add_argument(
        "--run-id",
        metavar="NAME",
        help="names the run; without it, that of the output file. "
        "The same name finds results of the last 3 days, also for another output file",
    )
    run.add_argument("--tenant", help="whose requests they are (gateway.tenant)")
    arguments.add_settings(run, FLAGS)
    return run, actions


def add_remote(actions: Actions) -> list[argparse.ArgumentParser]:
    """Add what a gateway is asked for; return the parsers."""

    def action(name: str, sentence: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)
        parser.set_defaults(action=name)
        parser.add_argument(
            "--base-url",
            default=os.environ.get("HEADRACE_BASE_URL", DEFAULT_URL),
            metavar="URL",
            help=f"of the gateway ($HEADRACE_BASE_URL, or {DEFAULT_URL})",
        )
        parser.add_argument(
            "--api-key",
            default=os.environ.get("HEADRACE_API_KEY", ""),
            metavar="KEY",
            help="where the gateway wants one ($HEADRACE_API_KEY)",
        )
        return parser

    submit = action("submit", "Send a file to a gateway, which runs its requests; print the ID.")
    submit.add_argument(
        *("-i", "--input-file"), type=Path, required=True, metavar="FILE", help="one request a line"
    )
    submit.add_argument("--endpoint", metavar="PATH", help="of every line (that of the first one)")
    submit.add_argument(
        "--completion-window",
        default="24h",
        metavar="TIME",
        help="until the rest is given up, as 90s, 30m, 24h or 7d (24h)",
    )
    submit.add_argument(
        "--metadata", action="append", default=[], metavar="KEY=VALUE", help="any number of times"
    )
    status = action("status", "Print how far a batch is; the exit code is 1 when it went wrong.")
    for parser in (submit, status):
        parser.add_argument("--follow", action="store_true", help="show it live until it is over")
    status.add_argument("--json", action="store_true", help="all that is known of it")
    cancel = action("cancel", "Cancel a batch; what is done is kept.")
    results = action("results", "Write the results of a batch, while it runs those that are there.")
    results.add_argument(
        *("-o", "--output-file"), type=Path, metavar="FILE", help="answers; - is stdout"
    )
    results.add_argument("--errors", type=Path, metavar="FILE", help="lines without an answer")
    for parser in (status, cancel, results):
        parser.add_argument("id", metavar="ID", help="of the batch")
    show_all = action("list", "List the newest batches.")
    show_all.add_argument("--limit", type=_positive, default=20, metavar="NUMBER", help="(20)")
    return [submit, status, cancel, results, show_all]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
