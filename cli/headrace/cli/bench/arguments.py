"""The arguments of `headrace bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from headrace.cli.bench.measures import goodput_limits
from headrace.shared.errors import SettingsError

DEFAULT_URL = "http://127.0.0.1:8000"


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add what `headrace bench` takes."""
    add = bench.add_argument
    add("--url", default=DEFAULT_URL, help=f"of the server ({DEFAULT_URL})")
    add("--model", default="", help="without it, the first that the server names")
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
    add("--goodput", default="", metavar="LIMITS", help="in ms, as 'ttft:2000 tpot:30'")
    add("--output", type=Path, metavar="FILE", help="where the JSON goes; without it, nowhere")
    add("--json", action="store_true", help="JSON on stdout instead of tables")


def bench(options: argparse.Namespace) -> int:
    """Run it; return 1 where a request failed. Raises: SettingsError, BenchError."""
    from rich.console import Console

    from headrace.cli.bench import prompts, report
    from headrace.cli.bench.run import Load, run

    if options.prompts is not None:
        asks = prompts.read_asks(options.prompts, options.requests, options.output_len)
    else:
        asks = prompts.random_asks(
            options.requests,
            num_input=options.input_len,
            num_output=options.output_len,
            vocab_size=options.vocab_size,
            num_turns=options.turns,
            seed=options.seed,
        )
    try:
        limits_ms = goodput_limits(options.goodput)
    except ValueError as error:
        raise SettingsError(f"--goodput: {error}") from None
    found = run(
        options.url,
        Load(
            asks=asks,
            rate=options.rate,
            concurrency=options.concurrency,
            seed=options.seed,
            warmup=options.warmup,
            limits_ms=limits_ms,
        ),
        model=options.model,
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
