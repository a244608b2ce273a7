"""`headrace bench --compare`: measures every setup, and says which one wins where."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cli import gpus
from headrace.cli.bench.compare import plots
from headrace.cli.bench.compare.points import Sweep
from headrace.cli.bench.compare.rounds import merged
from headrace.cli.bench.compare.server import running
from headrace.cli.bench.compare.setups import Setup, setups
from headrace.cli.bench.compare.sweep import Plan, sweep
from headrace.cli.bench.compare.table import markdown
from headrace.cli.bench.compare.verdict import best_tuned, verdict
from headrace.cli.bench.prompts import Ask
from headrace.cli.bench.run import BenchError
from headrace.cli.process import Guard, adopt_orphans
from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings

RESULT = "result.json"
ONE_START = "One start of each: how far another one would be from it is not known"


def compare(
    options: argparse.Namespace, settings: Settings, asks: list[Ask], limits_ms: dict[str, float]
) -> int:
    """Run it, and write JSON, table and plots; return 1 where a request failed.

    `asks` are enough for every rate and the warm-up. Raises: SettingsError, BenchError.
    """
    if not settings.up.prefill:
        raise SettingsError("--compare needs a prefill worker to compare with (up.prefill)")
    if not options.no_plots:
        plots.check_matplotlib()
    wanted = _wanted(setups(settings, options.chunks, _num_gpus(settings)), options.setups)
    taken = iter(asks)
    plan = Plan(
        warmup=[next(taken) for _ in range(num_warmup(options, settings))],
        asks={
            rate: [next(taken) for _ in range(num_asks(options, rate))] for rate in options.rates
        },
        seed=options.seed,
        limits_ms=limits_ms,
        num_rounds=options.rounds,
    )
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output {folder}: no folder can be made there: {error}") from None
    adopt_orphans()
    with Guard() as guard:
        sweeps = asyncio.run(_measure(wanted, plan, settings, folder, guard))
    if not any(one.points for one in sweeps):
        raise BenchError(f"no setup could be measured; their logs are in {folder}")
    kept = without_lesser_tuned(merged(sweeps))
    text = markdown(kept, verdict(kept), _facts(options, settings))
    (folder / "table.md").write_text(text, encoding="utf-8")
    if not options.no_plots:
        plots.draw(kept, folder)
    sys.stdout.write((folder / RESULT).read_text(encoding="utf-8") if options.json else text)
    _report(f"everything is in {folder}")
    return 1 if any(point["num_errors"] for one in sweeps for point in one.points) else 0


def num_asks(options: argparse.Namespace, rate: float) -> int:
    """Return how many conversations are begun at a rate."""
    seconds: float = options.seconds
    return max(1, round(rate * seconds))


def num_warmup(options: argparse.Namespace, settings: Settings) -> int:
    """Return how many conversations go first: every pair of engines has to meet."""
    asked: int = options.warmup
    return max(asked, 2 * settings.up.prefill * settings.up.decode)


def without_lesser_tuned(sweeps: list[Sweep]) -> list[Sweep]:
    """Return the sweeps with the best tuned one alone of those that are."""
    best = best_tuned([one for one in sweeps if one.is_tuned])
    return [one for one in sweeps if not one.is_tuned or one is best or one.skipped]


async def _measure(
    wanted: list[Setup], plan: Plan, settings: Settings, folder: Path, guard: Guard
) -> list[Sweep]:
    start = partial(_start, folder=folder, settings=settings, guard=guard)
    found: list[Sweep] = []
    async for found in sweep(wanted, plan, start, _report):
        kept = without_lesser_tuned(merged(found))
        written: dict[str, Any] = {
            "verdict": verdict(kept),
            "best": [one.name for one in kept],
            "setups": [asdict(one) for one in found],
        }
        text = json.dumps(written, indent=2)
        (folder / RESULT).write_text(f"{text}\n", encoding="utf-8")
    return found


def _start(setup: Setup, *, folder: Path, settings: Settings, guard: Guard) -> Any:
    return running(setup, folder, settings.up.ready_timeout_s, guard)


def _wanted(all_: list[Setup], names: list[str]) -> list[Setup]:
    known = [setup.name for setup in all_]
    if unknown := sorted(set(names) - set(known)):
        raise SettingsError(f"--setups {','.join(unknown)}: there are {', '.join(known)}")
    return [setup for setup in all_ if not names or setup.name in names]


def _num_gpus(settings: Settings) -> int:
    return len(gpus.visible()) if settings.up.engine == "vllm" else 0


def _facts(options: argparse.Namespace, settings: Settings) -> list[str]:
    load = (
        f"the prompts of {options.prompts}"
        if options.prompts is not None
        else f"{options.input_len} token IDs in, {options.output_len} out, {options.turns} turns"
    )
    starts = f"{options.rounds} starts of each" if options.rounds > 1 else ONE_START
    return [
        f"`{shlex.join(['headrace', *sys.argv[1:]])}`",
        "",
        f"{settings.model.name}, {load}; each rate for {options.seconds:g} s; good is {options.goodput}. {starts}. "
        "Times in ms.",
    ]


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
