"""Engines whose processes a test stops and kills: one that prefills, and one that decodes for each policy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from headrace.shared.errors import EngineDeadError
from headrace.shared.settings import DecodeSettings, PrefillSettings, Settings

from ..polling import eventually

LENGTH = 100  # token IDs: 4 blocks
NUM_PREFILL_BLOCKS = 12
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * 32  # layers, K and V, heads, head size, float32, token IDs
NUM_TOKEN_IDS = 5  # of an answer
LEASE_S = 3.0
PULL_TIMEOUT_S = 1.0

_fresh = itertools.count()


@dataclass
class Bench:
    """One prefill engine, and a decode engine of each policy; dead ones are started anew by `revive`."""

    settings: Settings
    engines: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    @property
    def prefill(self) -> Any:
        return self.engines["prefill"]

    @property
    def decodes(self) -> dict[str, Any]:
        return {name: self.engines[name] for name in ("fail", "recompute") if name in self.engines}

    async def revive(self) -> None:
        """Start what is not running, and make NIXL's first contacts."""
        from headrace.engine.vllm_engine import VllmDecodeEngine, VllmPrefillEngine

        dead = [name for name in ("prefill", "fail", "recompute") if name not in self.engines]
        for name in dead:
            others = set(multiprocessing.active_children())
            nixl = self.settings.nixl
            if name != "prefill":
                nixl = msgspec.structs.replace(nixl, port=0, load_failure_policy=name)
            kind = VllmPrefillEngine if name == "prefill" else VllmDecodeEngine
            engine = kind(msgspec.structs.replace(self.settings, nixl=nixl))
            await engine.start()
            (self.processes[name],) = set(multiprocessing.active_children()) - others
            self.engines[name] = engine
        for name, decode in self.decodes.items():
            if name in dead or "prefill" in dead:
                await decode.warm_handshake(await self.handoff([1]))

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            pid = self.processes[name].pid
            assert pid is not None
            os.kill(pid, number)

    @contextlib.contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """Let processes stand still."""
        self.signal(signal.SIGSTOP, *names)
        try:
            yield
        finally:
            for name in names:
                with contextlib.suppress(ProcessLookupError):
                    self.signal(signal.SIGCONT, name)

    async def kill(self, name: str) -> None:
        """Kill an engine's process, and wait until its service would know."""
        self.signal(signal.SIGKILL, name)
        await asyncio.to_thread(self.processes[name].join)
        engine = self.engines.pop(name)

        async def is_dead() -> bool:
            try:
                await engine.check_health()
            except EngineDeadError:
                return True
            return False

        await eventually(f"{name} is found to be dead", is_dead)
        await engine.shutdown()

    async def handoff(self, token_ids: list[int]) -> dict[str, Any]:
        result = await self.prefill.prefill(
            f"task-{next(_fresh)}", token_ids, cache_salt=None, priority=0
        )
        kv: dict[str, Any] = result.kv_transfer_params
        return kv

    async def handoffs(self, token_ids: list[int]) -> dict[str, dict[str, Any]]:
        """Return a handoff of the prompt for each decode engine."""
        return {name: await self.handoff(token_ids) for name in self.decodes}

    async def overwrite(self) -> None:
        """Let prefill use every free block for other prompts."""
        num_free = self.prefill.stats().num_blocks_free
        other = [await self.handoff(prompt()) for _ in range(num_free // blocks(LENGTH))]
        for kv in other:
            await self.decodes["recompute"].release_handoff(kv)

    async def answers(
        self, token_ids: list[int], handoffs: dict[str, dict[str, Any]]
    ) -> dict[str, list[int] | str]:
        """Return the token IDs of each decode engine's answer, or how it ended without any."""
        tasks = [answer(self.decodes[name], token_ids, kv) for name, kv in handoffs.items()]
        async with asyncio.timeout(60):
            return dict(zip(handoffs, await asyncio.gather(*tasks), strict=True))


def blocks(num_token_ids: int) -> int:
    return -(-num_token_ids // 32)


def prompt(length: int = LENGTH) -> list[int]:
    """Return a prompt that no test has used, so that no prefix cache knows it."""
    seed = next(_fresh)
    return [3000 + seed, *((i * 6271 + seed * 104729) % 40000 + 20 for i in range(length - 1))]


async def answer(
    decode: Any, token_ids: list[int], kv: dict[str, Any] | None = None, salt: str | None = None
) -> list[int] | str:
    """Return the greedy answer; the finish reason, if there is not one."""
    outputs = decode.generate(
        f"sequence-{next(_fresh)}",
        token_ids,
        msgspec.msgpack.encode(
            {"temperature": 0.0, "max_tokens": NUM_TOKEN_IDS, "ignore_eos": True}
        ),
        kv_transfer_params=kv,
        cache_salt=salt,
        priority=0,
    )
    found: list[int] = []
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            found += output.token_ids
            if output.finish_reason:
                return found or str(output.finish_reason)
    return "nothing"


def is_free(engine: Any) -> bool:
    stats = engine.stats()
    return bool(stats.num_running == 0 and stats.num_blocks_free == engine.info.num_blocks)


def is_pulling(engine: Any) -> bool:
    """Return whether the only request of an engine has its blocks; then its read is posted."""
    stats = engine.stats()
    return bool(stats.num_running == 1 and stats.num_blocks_free < engine.info.num_blocks)


def bench_settings(settings: Settings) -> Settings:
    """Return settings of a small prefill engine whose leases end soon, always at the same address."""
    from headrace.engine.vllm_start import free_port

    replace = msgspec.structs.replace
    return replace(
        settings,
        model=replace(settings.model, max_model_len=256),
        nixl=replace(settings.nixl, lease_s=LEASE_S, port=free_port("127.0.0.1")),
        prefill=PrefillSettings(
            engine={"kv_cache_memory_bytes": (NUM_PREFILL_BLOCKS + 1) * BLOCK_BYTES}
        ),
        decode=DecodeSettings(engine=settings.decode.engine, pull_timeout_s=PULL_TIMEOUT_S),
    )
