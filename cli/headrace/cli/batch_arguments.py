"""The arguments of `headrace batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli import arguments

#: of the stack that `--local` starts; the broker is that of the stack which runs already
FLAGS = {flag: key for flag, key in arguments.STACK_FLAGS.items() if key != "up.nats_url"}
FLAGS["--nats-url"] = "broker.url"


def add_batch(batch: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the actions of `headrace batch`; return the parser of `run`."""
    actions = batch.add_subparsers(required=True, metavar="ACTION")
    sentence = "Run the requests of a file and write their results to another, as `vllm run-batch`."
    run = actions.add_parser("run", help=sentence, description=sentence, allow_abbrev=False)
    run.add_argument(
        *("-i", "--input-file"), type=Path, required=True, metavar="FILE", help="one request a line"
    )
    run.add_argument(
        *("-o", "--output-file"),
        type=Path,
        required=True,
        metavar="FILE",
        help="one result a line, as they come; what stands in it already is not run again",
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
    return run


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
