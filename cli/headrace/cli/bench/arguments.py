"""The arguments of `headrace bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from headrace.cli import arguments
from headrace.cli.bench import numbers
from headrace.cli.bench.measures import goodput_limits
from headrace.cli.bench.prompts import Ask
from headrace.shared.errors import SettingsError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GOODPUT = "ttft:2000 tpot:30"
DEFAULT_FOLDER = Path("headrace-bench")
#: of `--compare`, which starts stacks; `--model` also says whom to ask without it
FLAGS = {
    "--model": "model.name",
    "--engine": "up.engine",
    "--prefill": "up.prefill",
    "--decode": "up.decode",
}
#: what only one of the two takes, as attributes: nothing that was given is ignored
ONE_SERVER = ("url", "api_key", "requests", "rate", "concurrency")
COMPARE = (
    *("rates", "seconds", "rounds", "prefill", "decode", "chunks", "setups"),
    *("no_plots", "engine", "engine_arg", "config", "set"),
)
WHOLE_NUMBERS = (
    ("--requests", 100, "conversations in all"),
    ("--input-len", 1024, "token IDs a prompt"),
    ("--output-len", 128, "token IDs an answer"),
    ("--turns", 1, "of a random conversation"),
    ("--vocab-size", 32_000, "random token IDs are below it"),
)


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add what `headrace bench` takes."""
    add = bench.add_argument
    add("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
    add("--model", help="without it, the first that the server names; with --compare, model.name")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="or OPENAI_API_KEY")
    when = bench.add_mutually_exclusive_group()
    when.add_argument(
        "--rate",
        type=numbers.rate,
        default=float("inf"),
        metavar="NUMBER",
        help="conversations begun a second, at random times (Poisson); without it all at once",
    )
    when.add_argument(
        "--concurrency",
        type=numbers.positive,
        default=0,
        metavar="NUMBER",
        help="so many at once, no more",
    )
    for flag, default, meaning in WHOLE_NUMBERS:
        add(
            flag,
            type=numbers.positive,
            default=default,
            metavar="NUMBER",
            help=f"{meaning} ({default})",
        )
    add("--prompts", type=Path, metavar="FILE", help="JSONL with prompt, messages or conversations")
    add("--seed", type=int, default=0, metavar="NUMBER", help="of prompts and times (0)")
    add(
        "--warmup",
        type=numbers.count,
        default=1,
        metavar="NUMBER",
        help="conversations not counted (1)",
    )
    add(
        "--goodput",
        default="",
        metavar="LIMITS",
        help=f"in ms, as '{DEFAULT_GOODPUT}'; also itl (p99 of each answer) and e2e",
    )
    add("--output", type=Path, metavar="FILE", help="where the JSON goes; with --compare, a folder")
    add("--json", action="store_true", help="JSON on stdout instead of tables")
    _add_compare(bench.add_argument_group("--compare"))
    defaults = {name: bench.get_default(name) for name in (*ONE_SERVER, *COMPARE)}
    bench.set_defaults(flags=FLAGS, defaults=defaults)


def _add_compare(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--compare",
        action="store_true",
        help="start the same engines as replicas, with chunks tuned, and as prefill and decode, one after "
        "the other, and say which wins where",
    )
    add(
        "--rates",
        type=numbers.rates,
        default=[1.0, 2.0, 4.0],
        help="conversations a second (1,2,4)",
    )
    add("--seconds", type=numbers.finite, default=60.0, metavar="NUMBER", help="of each rate (60)")
    add(
        "--rounds",
        type=numbers.positive,
        default=2,
        metavar="NUMBER",
        help="starts of each setup (2)",
    )
    add("--prefill", metavar="NUMBER", help="prefill workers (up.prefill)")
    add("--decode", metavar="NUMBER", help="decode workers (up.decode); replicas: both together")
    add(
        "--chunks",
        type=numbers.positives,
        default=[512, 2048, 8192],
        help="max_num_batched_tokens that are tried with replicas (512,2048,8192)",
    )
    add(
        "--setups",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        help="only these, as replicas,pd",
    )
    add("--no-plots", action="store_true", help="do without matplotlib")
    add("--engine", metavar="VALUE", help="vllm or fake (up.engine)")
    add("--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="of vLLM's engines")
    add("--config", type=Path, metavar="FILE", help="the settings file, TOML")
    add(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting; repeatable",
    )


def bench(options: argparse.Namespace) -> int:
    """Run it; return 1 where a request failed. Raises: SettingsError, BenchError."""
    _check_mode(options)
    if options.compare:
        return _compare(options)
    from rich.console import Console

    from headrace.cli.bench import report
    from headrace.cli.bench.run import Load, run

    limits_ms = _limits(options.goodput)
    if options.output is not None and not options.output.parent.is_dir():
        raise SettingsError(
            f"--output {options.output}: there is no folder {options.output.parent}"
        )
    asks = _asks(options, options.warmup + options.requests)
    found = run(
        options.url,
        Load(
            asks=asks[options.warmup :],
            rate=options.rate,
            concurrency=options.concurrency,
            seed=options.seed,
            warmup=asks[: options.warmup],
            limits_ms=limits_ms,
        ),
        model=options.model or "",
        api_key=options.api_key,
    )
    text = json.dumps(found, indent=2)
    if options.output is not None:
        options.output.write_text(f"{text}\n", encoding="utf-8")
    if options.json:
        sys.stdout.write(f"{text}\n")
    else:
        report.show(found, Console())
    return 1 if found["num_errors"] else 0


def _compare(options: argparse.Namespace) -> int:
    from headrace.cli.bench.compare import run as comparing

    options.goodput = options.goodput or DEFAULT_GOODPUT
    limits_ms = _limits(options.goodput)
    options.output = options.output or DEFAULT_FOLDER
    settings = arguments.load_settings(options)
    num = comparing.num_warmup(options, settings)
    num += sum(comparing.num_asks(options, rate) for rate in options.rates)
    return comparing.compare(options, settings, _asks(options, num), limits_ms)


def _check_mode(options: argparse.Namespace) -> None:
    """Raises: SettingsError for a flag that has no meaning here."""
    foreign: tuple[str, ...] = ONE_SERVER if options.compare else COMPARE
    why = "is of --compare"
    if options.compare:
        why = "is of one server: --compare starts its own, and sends --rates"
    for name in foreign:
        if getattr(options, name) != options.defaults[name]:
            raise SettingsError(f"--{name.replace('_', '-')} {why}")


def _asks(options: argparse.Namespace, num: int) -> list[Ask]:
    from headrace.cli.bench import prompts

    if options.prompts is not None:
        return prompts.read_asks(options.prompts, num, options.output_len)
    return prompts.random_asks(
        num,
        num_input=options.input_len,
        num_output=options.output_len,
        vocab_size=options.vocab_size,
        num_turns=options.turns,
        seed=options.seed,
    )


def _limits(text: str) -> dict[str, float]:
    try:
        return goodput_limits(text)
    except ValueError as error:
        raise SettingsError(f"--goodput: {error}") from None
