"""The `headrace` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from headrace.cli import arguments, logs
from headrace.shared.errors import HeadraceError, SettingsError
from headrace.shared.subjects import Role

SUPERVISOR_LOG_LEVEL: logs.LogLevel = "warning"  # it reports to the terminal in its own words
DEMO_QUESTION = "What is the capital of France?"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code.

    0: ended well, 1: failed, 2: a wrong setting, 3: the engine is dead.
    """
    options = build_parser().parse_args(argv)
    try:
        return int(options.run(options))
    except SettingsError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return 2
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return 1
    except KeyboardInterrupt:  # before there was anything to drain
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every subcommand; `options.run` is the function to call."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Serve language models as four stages over NATS.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=_version(), help="print the version and end"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = _command(commands, "up", "Start a whole stack on this machine, broker included.")
    up.set_defaults(run=_up)

    demo = _command(
        commands, "demo", "Start a stack, ask one question, show where the time went, stop."
    )
    demo.add_argument(
        "question", nargs="?", default=DEMO_QUESTION, help=f"what to ask ({DEMO_QUESTION})"
    )
    demo.set_defaults(run=_demo)

    serve = _command(commands, "serve", "Run one worker of one stage in the foreground.")
    serve.add_argument(
        "role",
        choices=[str(role) for role in Role],
        metavar="ROLE",
        help=f"the stage: {', '.join(Role)}",
    )
    serve.add_argument(
        "--instance-index",
        type=int,
        default=0,
        metavar="NUMBER",
        help="which worker of its role this is, for its log; 0 is the first",
    )
    serve.set_defaults(run=_serve)

    for command in (up, demo, serve):
        arguments.add_settings(
            command, arguments.WORKER_FLAGS if command is serve else arguments.STACK_FLAGS
        )
        command.add_argument(
            "--log-format",
            choices=logs.FORMATS,
            default="human",
            help="logs for people, or a JSON object a line (human)",
        )
        command.add_argument(
            "--log-level", choices=logs.LEVELS, default="info", help="the least to log (info)"
        )

    version = _command(commands, "version", "Print the version.")
    version.set_defaults(run=_print_version)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, sentence: str
) -> argparse.ArgumentParser:
    # no abbreviations: `serve decode --decode 2` must not become `--decode-arg 2`
    return commands.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)


# each command imports what only it needs: `serve gateway` has no use for the rest


def _up(options: argparse.Namespace) -> int:
    from headrace.cli import up

    logs.configure(options.log_format, SUPERVISOR_LOG_LEVEL, role="up")
    return up.up(arguments.load_settings(options), options.log_format, options.log_level)


def _demo(options: argparse.Namespace) -> int:
    from headrace.cli import demo

    if not options.question.strip():
        raise SettingsError("the question is empty: give one, or none at all for the default")
    logs.configure(options.log_format, SUPERVISOR_LOG_LEVEL, role="demo")
    settings = arguments.load_settings(options, demo.PRESETS)
    return demo.demo(settings, options.question, options.log_format, options.log_level)


def _serve(options: argparse.Namespace) -> NoReturn:
    from headrace.cli import serve

    settings = arguments.load_settings(options)
    logs.configure(
        options.log_format, options.log_level, role=f"{options.role}-{options.instance_index}"
    )
    code = serve.serve(Role(options.role), settings)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # the service has closed what it had; unloading torch and vLLM takes seconds


def _print_version(options: argparse.Namespace) -> int:
    sys.stdout.write(f"{_version()}\n")
    return 0


def _version() -> str:
    try:
        return f"headrace {metadata.version('headrace')}"
    except metadata.PackageNotFoundError:  # run from a checkout
        return "headrace unknown"


if __name__ == "__main__":
    sys.exit(main())
