"""The `headrace` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from headrace.cli import arguments, logs, operator_arguments
from headrace.cli.batch import arguments as batch_arguments
from headrace.cli.bench import arguments as bench_arguments
from headrace.cli.doctor import arguments as doctor_arguments
from headrace.shared.errors import HeadraceError, SettingsError
from headrace.shared.subjects import Role

SUPERVISOR_LOG_LEVEL: logs.LogLevel = "warning"  # it reports to the terminal in its own words
OPERATOR_LOG_LEVEL: logs.LogLevel = "error"  # what a broker denies, the command says itself
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

    batch = _command(commands, "batch", "Run many requests from a file.")
    run, actions = batch_arguments.add_batch(batch)
    run.set_defaults(run=_run_batch)
    for parser_of_action in batch_arguments.add_remote(actions):
        parser_of_action.set_defaults(run=_ask_gateway)

    arguments.add_colocated(up)
    for command in (up, demo, serve):
        arguments.add_settings(
            command, arguments.WORKER_FLAGS if command is serve else arguments.STACK_FLAGS
        )
    for command in (up, demo, serve, run):
        command.add_argument(
            "--log-format",
            choices=logs.FORMATS,
            default="human",
            help="logs for people, or a JSON object a line (human)",
        )
        command.add_argument(
            "--log-level", choices=logs.LEVELS, default="info", help="the least to log (info)"
        )

    keys = _command(commands, "keys", "Make API keys.")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    new = _command(actions, "new", "Print a new API key, and its line for gateway.api_keys_file.")
    new.add_argument("--tenant", required=True, help="whose requests the key lets in")
    new.add_argument("--name", default="", help="for people: who has it, what it is for")
    new.add_argument(
        "--expires-days", type=int, metavar="DAYS", help="days until it expires; without it: never"
    )
    new.set_defaults(run=_new_key)

    dlq = _command(commands, "dlq", "List, show, replay and drop dead letters.")
    operator_arguments.add_dlq(dlq)
    dlq.set_defaults(run=_dlq)

    top = _command(commands, "top", "Show workers, queues and the longest-running requests, live.")
    operator_arguments.add_top(top)
    top.set_defaults(run=_top)

    log_level = _command(commands, "log-level", "Change how much running processes log.")
    operator_arguments.add_log_level(log_level)
    log_level.set_defaults(run=_log_level)

    health = _command(commands, "health", "Ask a process of this machine whether it is well.")
    health.add_argument(
        "url", help="as http://127.0.0.1:8000/ready; exit code 0 where it answers 200"
    )
    health.set_defaults(run=_health)

    doctor = _command(
        commands, "doctor", "Check this machine and the stack that runs; move KV blocks."
    )
    doctor_arguments.add_doctor(doctor)
    arguments.add_settings(doctor, arguments.WORKER_FLAGS)
    doctor.set_defaults(run=_doctor)

    bench = _command(commands, "bench", "Put load on an OpenAI-compatible server, and measure.")
    bench_arguments.add_bench(bench)
    bench.set_defaults(run=bench_arguments.bench)

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
    from headrace.cli.demo import run as demo

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


def _run_batch(options: argparse.Namespace) -> int:
    from headrace.cli.batch import run as batch_run
    from headrace.cli.batch.transfer import Transfer

    logs.configure(options.log_format, SUPERVISOR_LOG_LEVEL, role="batch")
    if not sys.stderr.isatty():  # there a bar says how far it is
        logging.getLogger("headrace.cli").setLevel(options.log_level.upper())
    settings = arguments.load_settings(options, batch_run.LOCAL_PRESETS if options.local else None)
    if options.local and options.nats_url:
        raise SettingsError("--local starts a stack with a broker of its own: leave out --nats-url")
    transfer = Transfer.of(options.input_file, options.output_file)
    transfer.fetch()
    batch = batch_run.Batch(
        input_file=transfer.input_file,
        output_file=transfer.output_file,
        transfer=transfer,
        tenant=options.tenant or settings.gateway.tenant,
        concurrency=options.concurrency,
        retry_failed=options.retry_failed,
        run_id=options.run_id,
    )
    if options.local:
        return batch_run.run_locally(batch, settings, options.log_format, options.log_level)
    return batch_run.run(batch, settings)


def _ask_gateway(options: argparse.Namespace) -> int:
    from headrace.cli.batch import remote

    return remote.run(options)


def _new_key(options: argparse.Namespace) -> int:
    from headrace.cli import keys

    sys.stdout.write(keys.new(options.tenant, options.name, options.expires_days))
    return 0


def _dlq(options: argparse.Namespace) -> int:
    from headrace.cli.dlq import run as dlq

    logs.configure("human", OPERATOR_LOG_LEVEL, role="dlq")
    return dlq.run(options, arguments.load_settings(options).broker)


def _top(options: argparse.Namespace) -> int:
    from headrace.cli.top import run as top

    logs.configure("human", OPERATOR_LOG_LEVEL, role="top")
    return top.run(options, arguments.load_settings(options).broker)


def _health(options: argparse.Namespace) -> int:
    from headrace.cli import health

    return health.check(options.url)


def _doctor(options: argparse.Namespace) -> int:
    from headrace.cli.doctor.run import run as doctor

    logs.configure("human", OPERATOR_LOG_LEVEL, role="doctor")
    return doctor(options, arguments.load_settings(options))


def _log_level(options: argparse.Namespace) -> int:
    from headrace.cli import log_level

    logs.configure("human", OPERATOR_LOG_LEVEL, role="log-level")
    return log_level.run(options.role, options.level, arguments.load_settings(options).broker)


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
