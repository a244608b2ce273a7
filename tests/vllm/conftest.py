"""One prefill and one decode engine, real ones, for the whole session."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from headrace.shared.settings import (
    DecodeSettings,
    ModelSettings,
    NixlSettings,
    PrefillSettings,
    Settings,
    home,
)

from .. import polling
from ..real_stack import Stacks

if TYPE_CHECKING:
    from headrace.engine.vllm_engine import VllmDecodeEngine, VllmPrefillEngine

KV_CACHE_BYTES = 128 * 2**20
ENGINE = {"kv_cache_memory_bytes": KV_CACHE_BYTES}

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@dataclass(frozen=True)
class Engines:
    """The pair, and how long each took to start."""

    prefill: VllmPrefillEngine
    decode: VllmDecodeEngine
    start_s: tuple[float, float]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; what torch and vLLM warn of is no error here."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def engine_settings(stacks: Stacks) -> Settings:
    """Settings of engines that answer token for token alike: float32, and little memory."""
    stacks.close()  # it would take memory and a part of each core
    model = Path(os.environ.get("HEADRACE_TEST_MODEL") or home() / "models/smollm2-135m-instruct")
    if not model.is_dir():
        pytest.fail(f"no model in {model}: run `headrace demo`, or set HEADRACE_TEST_MODEL")
    return Settings(
        model=ModelSettings(name=str(model), dtype="float32", block_size=32, max_model_len=1024),
        nixl=NixlSettings(lease_s=30.0),
        prefill=PrefillSettings(engine=ENGINE),
        decode=DecodeSettings(engine=ENGINE),
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(engine_settings: Settings) -> AsyncIterator[Engines]:
    """The pair, with NIXL's first contact made."""
    from headrace.engine.vllm_engine import VllmDecodeEngine, VllmPrefillEngine

    prefill, decode = VllmPrefillEngine(engine_settings), VllmDecodeEngine(engine_settings)
    try:
        times = [time.monotonic()]
        for engine in (prefill, decode):
            await engine.start()
            times.append(time.monotonic())
        result = await prefill.prefill("warm", [1], cache_salt=None, priority=0)
        await decode.warm_handshake(result.kv_transfer_params)
        yield Engines(prefill, decode, (times[1] - times[0], times[2] - times[1]))
    finally:
        await asyncio.gather(prefill.shutdown(), decode.shutdown())


@pytest.fixture
def eventually() -> Eventually:
    """Wait for what another process does; it tells us when it steps, not when a block is free."""

    return partial(polling.eventually, "what the test waits for")
