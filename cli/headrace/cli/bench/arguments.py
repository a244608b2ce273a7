"""The arguments of `headrace bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from headrace.cli import arguments
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


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add what `headrace bench` takes."""
    add = bench.add_argument
    add("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
    add("--model", help="without it, the first that the server names; with --compare, model.name")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="or OPENAI_API_KEY")
    add("--requests", type=int, default=100, metavar="NUMBER", help="conversations in all (100)")
    when = bench.add_mutually_exclusive_group()
    when.add_argument(
        "--rate",
        type=float,
        default=float("inf"),
        metavar="NUMBER",
        help="conversations begun a second, at random times (Poisson); without it all at once",
    )
    when.add_argument(
        "--concurrency", type=int, default=0, metavar="NUMBER", help="so many at once, no more"
    )
    add("--input-len", type=int, default=1024, metavar="NUMBER", help="token IDs a prompt (1024)")
    add("--output-len", type=int, default=128, metavar="NUMBER", help="token IDs an answer (128)")
    add("--turns", type=int, default=1, metavar="NUMBER", help="of a random conversation (1)")
    add("--vocab-size", type=int, default=32_000, metavar="NUMBER", help="random IDs are below it")
    add("--prompts", type=Path, metavar="FILE", help="JSONL with prompt, messages or conversations")
    add("--seed", type=int, default=0, metavar="NUMBER", help="of prompts and times (0)")
    add("--warmup", type=int, default=1, metavar="NUMBER", help="conversations not counted (1)")
    add(
        "--goodput",
        default="",
        metavar="LIMITS",
        help=f"in ms, as '{DEFAULT_GOODPUT}'; also itl (p99 of each answer) and e2e",
    )
    add("--output", type=Path, metavar="FILE", help="where the JSON goes; with --compare, a folder")
    add("--json", action="store_true", help="JSON on stdout instead of tables")
    _add_compare(bench.add_argument_group("--compare"))


def _add_compare(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--compare",
        action="store_true",
        help="start the same engines as replicas, with chunks tuned, and as prefill and decode, one after "
        "the other, and say which wins where",
    )
    add("--rates", type=_numbers, default=[1.0, 2.0, 4.0], help="conversations a second (1,2,4)")
    add("--seconds", type=float, default=60.0, metavar="NUMBER", help="of each rate (60)")
    add("--rounds", type=int, default=2, metavar="NUMBER", help="starts of each setup (2)")
    add("--prefill", metavar="NUMBER", help="prefill workers (up.prefill)")
    add("--decode", metavar="NUMBER", help="decode workers (up.decode); replicas: both together")
    add(
        "--chunks",
        type=lambda text: [int(number) for number in text.split(",") if number],
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
    group.set_defaults(flags=FLAGS)


def bench(options: argparse.Namespace) -> int:
    """Run it; return 1 where a request failed. Raises: SettingsError, BenchError."""
    if options.compare:
        return _compare(options)
    from rich.console import Console

    from headrace.cli.bench import report
    from headrace.cli.bench.run import Load, run

    asks = _asks(options, options.warmup + options.requests)
    found = run(
        options.url,
        Load(
            asks=asks[options.warmup :],
            rate=options.rate,
            concurrency=options.concurrency,
            seed=options.seed,
            warmup=asks[: options.warmup],
            limits_ms=_limits(options.goodput),
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
    options.output = options.output or DEFAULT_FOLDER
    settings = arguments.load_settings(options)
    num = comparing.num_warmup(options, settings)
    num += sum(comparing.num_asks(options, rate) for rate in options.rates)
    return comparing.compare(options, settings, _asks(options, num), _limits(options.goodput))


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


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]
