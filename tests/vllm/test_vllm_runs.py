"""A copy of a prefill task is a run of its own; needs vLLM's types, but no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.engine.interface import EngineInfo
from headrace.shared.settings import Settings

INFO = EngineInfo(
    engine_id="p",
    block_size=16,
    num_blocks=8,
    max_model_len=512,
    vocab_size=257,
    block_bytes=1,
    lease_s=30.0,
)


class Process:
    """An engine that computes for ever, and what it is told."""

    def __init__(self) -> None:
        self.engine = self
        self.runs: asyncio.Queue[str] = asyncio.Queue()
        self.dropped: asyncio.Queue[str] = asyncio.Queue()

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        self.runs.put_nowait(request_id)
        await asyncio.Event().wait()
        yield

    async def collective_rpc(self, method: str, args: tuple[str]) -> None:
        self.dropped.put_nowait(args[0])


async def test_what_ends_one_run_of_a_task_leaves_the_lease_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.engine.vllm_engine import VllmPrefillEngine

    process = Process()
    engine: Any = VllmPrefillEngine(Settings())
    monkeypatch.setattr(engine, "_process", process)
    monkeypatch.setattr(engine, "_info", INFO)
    names = []
    for _ in range(2):
        run = asyncio.create_task(engine.prefill("t", [5], cache_salt=None, priority=0))
        names.append(await process.runs.get())
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert await process.dropped.get() == names[-1]
    assert len(set(names)) == 2
    assert all(name.startswith("t-") for name in names)
