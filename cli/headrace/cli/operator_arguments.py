"""The arguments of `headrace dlq`, `headrace top` and `headrace log-level`."""

from __future__ import annotations

import argparse
from typing import get_args

from headrace.cli.arguments import add_broker
from headrace.shared.messages import LevelName
from headrace.shared.subjects import Role

INTERVAL_S = 2.0


def add_dlq(dlq: argparse.ArgumentParser) -> None:
    """Add the actions of `headrace dlq`."""
    actions = dlq.add_subparsers(required=True, metavar="ACTION", dest="action")

    def action(name: str, sentence: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)
        add_broker(parser)
        return parser

    show_all = action("list", "List dead letters, oldest first.")
    _add_stage(show_all)
    show_all.add_argument("--json", action="store_true", help="a JSON array")

    show = action("show", "Print one dead letter as JSON, without what its caller wrote.")
    show.add_argument("id", type=_id, metavar="ID", help="the ID that `list` shows")
    show.add_argument("--payload", action="store_true", help="also the body, and token IDs")

    again = action("replay", "Try dead letters again, as requests that were accepted just now.")
    again.add_argument(
        "--anew", action="store_true", help="let render make a job again, as after a new contract"
    )
    drop = action("drop", "Take dead letters out, for good.")
    for parser in (again, drop):
        parser.add_argument("ids", nargs="*", type=_id, metavar="ID", help="which ones")
        parser.add_argument("--all", action="store_true", help="all there are")
        _add_stage(parser)
        parser.add_argument("--yes", action="store_true", help="do not ask")


def add_top(top: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace top`."""
    add_broker(top)
    top.add_argument(
        "--interval",
        type=_interval,
        default=INTERVAL_S,
        metavar="SECONDS",
        help=f"between two looks ({INTERVAL_S:g})",
    )
    form = top.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one look as text, and end")
    form.add_argument("--json", action="store_true", help="print one look as JSON, and end")


def add_log_level(log_level: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace log-level`."""
    add_broker(log_level)
    log_level.add_argument("role", choices=[*map(str, Role), "all"], help="of which processes")
    log_level.add_argument("level", choices=get_args(LevelName), help="the least to log")


def _add_stage(parser: argparse.ArgumentParser) -> None:
    stages = [str(role) for role in Role if role is not Role.GATEWAY]
    parser.add_argument("--stage", choices=stages, help="only those that this stage put aside")


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no ID, as 7")
    return int(text)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text!r}")
    return seconds
