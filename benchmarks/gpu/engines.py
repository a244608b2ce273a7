"""Engines in this process, called directly: no HTTP, no broker, no text."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import loads

from headrace.cli.bench.measures import Measured
from headrace.cli.bench.prompts import Ask
from headrace.shared.settings import DecodeSettings, ModelSettings, PrefillSettings, Settings

Send = Callable[[Ask], Awaitable[list[Measured]]]
"""Holds a conversation, a turn after the other."""


def engine_arguments(options: argparse.Namespace, *, is_caching: bool = False) -> dict[str, Any]:
    """Return what every engine is started with; `is_caching`: with its prefix cache."""
    given: dict[str, Any] = {
        "gpu_memory_utilization": options.memory,
        "kv_cache_memory_bytes": options.kv_gib * 2**30,
        "enable_prefix_caching": is_caching,
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


@contextlib.asynccontextmanager
async def prefill_and_decode(
    options: argparse.Namespace, arguments: dict[str, Any]
) -> AsyncIterator[Send]:
    """Give a prefill engine on the first GPU and a decode engine on the last, as one."""
    from headrace.engine.vllm_engine import VllmDecodeEngine, VllmPrefillEngine

    settings = _settings(options, arguments, is_colocated=False)
    prefill, decode = VllmPrefillEngine(settings), VllmDecodeEngine(settings)
    params = _params(options)
    names = itertools.count()

    async def send(ask: Ask) -> list[Measured]:
        return [await turn(token_ids, ask) for token_ids in loads.turns(ask)]

    async def turn(token_ids: list[int], ask: Ask) -> Measured:
        name = next(names)
        one = Measured(start=time.perf_counter(), num_prompt_token_ids=len(token_ids))
        result = await prefill.prefill(f"p{name}", token_ids, cache_salt=None, priority=0)
        done = time.perf_counter()
        await _generate(decode, f"d{name}", token_ids, params(ask), one, result.kv_transfer_params)
        assert one.ttft_s is not None
        one.stages = {
            "prefill_s": done - one.start,
            "gap_s": one.start + one.ttft_s - done,
            **(one.stages or {}),
        }
        return one

    try:
        with on_gpu(options.gpus[0]):
            await prefill.start()
        with on_gpu(options.gpus[-1]):
            await decode.start()
        first = await prefill.prefill("warm", [1], cache_salt=None, priority=0)
        await decode.warm_handshake(first.kv_transfer_params)
        yield send
    finally:
        await asyncio.gather(prefill.shutdown(), decode.shutdown())


@contextlib.asynccontextmanager
async def replicas(options: argparse.Namespace, arguments: dict[str, Any]) -> AsyncIterator[Send]:
    """Give two engines without a connector; a request goes to the one that runs fewer."""
    from headrace.engine.vllm_engine import VllmDecodeEngine

    settings = _settings(options, arguments, is_colocated=True)
    engines = [VllmDecodeEngine(settings) for _ in range(2)]
    running = [0, 0]
    params = _params(options)
    names = itertools.count()

    async def send(ask: Ask) -> list[Measured]:
        return [await turn(token_ids, ask) for token_ids in loads.turns(ask)]

    async def turn(token_ids: list[int], ask: Ask) -> Measured:
        one = Measured(start=time.perf_counter(), num_prompt_token_ids=len(token_ids))
        least = running.index(min(running))
        running[least] += 1
        try:
            await _generate(engines[least], f"r{next(names)}", token_ids, params(ask), one, None)
        finally:
            running[least] -= 1
        return one

    try:
        for engine, gpu in zip(engines, (options.gpus[0], options.gpus[-1]), strict=True):
            with on_gpu(gpu):
                await engine.start()
        yield send
    finally:
        await asyncio.gather(*(engine.shutdown() for engine in engines))


async def _generate(
    engine: Any,
    name: str,
    token_ids: list[int],
    params: bytes,
    one: Measured,
    kv_transfer_params: dict[str, Any] | None,
) -> None:
    outputs = engine.generate(
        name,
        token_ids,
        params,
        kv_transfer_params=kv_transfer_params,
        cache_salt=None,
        priority=0,
    )
    last = one.start
    async for output in outputs:
        now = time.perf_counter()
        if one.ttft_s is None:
            one.ttft_s = now - one.start
            if output.kv_transfer_s is not None:
                one.stages = {
                    "kv_transfer_s": output.kv_transfer_s,
                    "kv_transfer_bytes": output.kv_transfer_bytes,
                }
        elif output.token_ids:
            one.itls_s.append(now - last)
        last = now
        one.num_output_token_ids += len(output.token_ids)
        if output.finish_reason == "error":
            one.error = "the engine failed this request"
    one.e2e_s = last - one.start


def _settings(
    options: argparse.Namespace, arguments: dict[str, Any], *, is_colocated: bool
) -> Settings:
    return Settings(
        model=ModelSettings(
            name=options.model, block_size=options.block, max_model_len=options.max_len
        ),
        prefill=PrefillSettings(engine=arguments),
        decode=DecodeSettings(engine=arguments, colocated=is_colocated),
    )


def _params(options: argparse.Namespace) -> Callable[[Ask], bytes]:
    import msgspec
    from vllm import SamplingParams

    def params(ask: Ask) -> bytes:
        length = ask.num_output_token_ids
        return msgspec.msgpack.encode(
            SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        )

    return params
