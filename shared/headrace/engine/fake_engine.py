"""Engines without a model: deterministic answers, real blocks, leases and pulls, faults on demand.

They err as vLLM does: a used, expired or foreign handoff gives a wrong answer with a normal finish
reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from headrace.engine.fake_base import BLOCK_BYTES, FakeEngine
from headrace.engine.fake_blocks import Leases
from headrace.engine.fake_faults import FaultPlan
from headrace.engine.fake_kv import Pull, PullFailedError, PullServer
from headrace.engine.fake_steps import Sequence, StepLoop
from headrace.engine.fake_text import (
    FakeSamplingParams,
    continuation,
    decode_sampling_params,
    expected_output,
    expected_prompt_logprobs,
    kv_content,
)
from headrace.engine.handoff_check import check_kv_transfer_params, check_origin
from headrace.engine.interface import DecodeOutput, EngineInfo, EngineStats, PrefillResult
from headrace.engine.request_check import check_prompt, check_prompt_logprobs
from headrace.shared.errors import EngineDeadError, EngineRequestError
from headrace.shared.settings import Settings

__all__ = ["FakeDecodeEngine", "FakePrefillEngine", "FaultPlan", "expected_output"]

RELEASE_TIMEOUT_S = 1.0  # a stopped prefill process never answers; vLLM's call does not wait at all


class FakePrefillEngine(FakeEngine):
    """Leases blocks that decode engines, of this process or another, pull over TCP."""

    def __init__(self, settings: Settings, faults: FaultPlan | None = None) -> None:
        super().__init__(settings, faults)
        self._leases = Leases(self._pool, self.info.lease_s, self._notify)
        self._server = PullServer(self.info.engine_id, self._pool, self._leases, self.faults)
        self._port = 0

    async def start(self) -> EngineInfo:
        """Listen for pulls."""
        await super().start()
        self._port = await self._server.start(self._settings.nixl.host, self._settings.nixl.port)
        return self.info

    async def prefill(
        self,
        task_id: str,
        token_ids: list[int],
        *,
        cache_salt: str | None,
        priority: int,
        prompt_logprobs: int | None = None,
    ) -> PrefillResult:
        """Compute one prompt and lease its blocks; salt and priority change nothing here."""
        check_prompt(token_ids, self.info)
        with self._request():
            count = -(-len(token_ids) // self.info.block_size)
            blocks = await self._pool.acquire(count)
            try:
                self._pool.write(blocks, await self._compute(token_ids))
            except BaseException:
                self._pool.release(blocks)
                raise
            request_id = f"{task_id}-{uuid.uuid4().hex[:8]}"
            expires = time.time() + self.info.lease_s
            self._leases.add(request_id, blocks)
            if self.faults.expire_early:
                self._leases.expire_all()
        return PrefillResult(
            kv_transfer_params={
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [blocks],
                "remote_engine_id": self.info.engine_id,
                "remote_request_id": request_id,
                "remote_host": self._settings.nixl.host,
                "remote_port": self._port,
                "tp_size": 1,
                "remote_num_tokens": len(token_ids),
                "transfer_mode": "pull",
            },
            expires=expires,
            num_cached_token_ids=0,
            prompt_logprobs=expected_prompt_logprobs(token_ids, prompt_logprobs),
        )

    async def drop_lease(self, kv_transfer_params: dict[str, Any]) -> None:
        """Free the blocks of a handoff that nobody has."""
        self._leases.end(kv_transfer_params["remote_request_id"])

    @property
    def num_held_leases(self) -> int:
        """How many handoffs a decode engine is about to pull."""
        return self._leases.num_held

    def release(self) -> None:
        """Let go of requests, and of pulls that `FaultPlan.hang_pulls` holds."""
        super().release()
        self._server.resume()

    def expire_leases(self) -> None:
        """Let every lease that nobody is pulling run out now; for tests."""
        self._leases.expire_all()

    def die(self) -> None:
        """End the engine; pulls fail from now on."""
        super().die()
        self._server.close()

    def stats(self) -> EngineStats:
        """Return the counters as they are."""
        return dataclasses.replace(
            super().stats(),
            num_leases=len(self._leases),
            num_expired_leases=self._leases.num_expired,
        )

    async def shutdown(self) -> None:
        """Stop listening; whoever pulls now sees a dead engine."""
        self.die()
        self._leases.close()


class FakeDecodeEngine(FakeEngine):
    """Answers what its KV cache holds, be that its own prefill or what a pull brought."""

    def __init__(self, settings: Settings, faults: FaultPlan | None = None) -> None:
        super().__init__(settings, faults)
        self._steps = StepLoop(settings.fake.step_s, self._stall, self._after_step)

    async def generate(
        self,
        sequence_id: str,
        token_ids: list[int],
        sampling_params: bytes,
        *,
        kv_transfer_params: dict[str, Any] | None,
        cache_salt: str | None,
        priority: int,
        seed_offset: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        prompt_logprobs: int | None = None,
    ) -> AsyncGenerator[DecodeOutput, None]:
        """Yield the answer step by step; salt, priority and reasoning change nothing here."""
        check_prompt_logprobs(prompt_logprobs, kv_transfer_params)
        params = decode_sampling_params(sampling_params)
        check_prompt(token_ids, self.info, max_tokens=params.max_tokens)
        if params.seed is not None:
            params.seed += seed_offset
        if kv_transfer_params is not None:
            check_kv_transfer_params(
                kv_transfer_params,
                num_prompt_token_ids=len(token_ids),
                block_size=self.info.block_size,
            )
        with self._request():
            if kv_transfer_params is None:
                async with self._blocks(len(token_ids)):
                    content = await self._compute(token_ids)
                    table = expected_prompt_logprobs(token_ids, prompt_logprobs)
                    async with contextlib.aclosing(
                        self._run(content, token_ids, params)
                    ) as outputs:
                        async for output in outputs:
                            yield msgspec.structs.replace(output, prompt_logprobs=table)
                            table = None
                return
            async with Pull(kv_transfer_params) as pull, self._blocks(len(token_ids)):
                started = time.perf_counter()
                try:
                    async with asyncio.timeout(self._settings.decode.pull_timeout_s):
                        content = await self._stepping(pull.pull())
                except (PullFailedError, TimeoutError):
                    self._add(num_failed_kv_transfers=1)
                    yield DecodeOutput(token_ids=[], finish_reason="error")
                    return
                first = self._pulled(
                    kv_transfer_params, len(token_ids), time.perf_counter() - started
                )
                await self._hold(len(token_ids))
                async with contextlib.aclosing(self._run(content, token_ids, params)) as outputs:
                    async for output in outputs:
                        yield msgspec.structs.replace(output, **first)
                        first = {"num_cached_token_ids": len(token_ids)}

    def _pulled(self, kv: dict[str, Any], num_token_ids: int, seconds: float) -> dict[str, Any]:
        """Count a pull, and return what the sequence's first output says of it."""
        num_blocks = sum(map(len, kv["remote_block_ids"]))
        num_bytes = num_blocks * BLOCK_BYTES
        self._add(
            num_external_cached_token_ids=num_token_ids,
            kv_transfer_bytes=num_bytes,
            kv_transfer_s=seconds,
            num_kv_transfers=1,
        )
        return {
            "num_cached_token_ids": num_token_ids,
            "kv_transfer_s": seconds,
            "kv_post_s": 0.0,
            "kv_notice_s": 0.0,
            "kv_transfer_bytes": num_bytes,
            "num_kv_descriptors": num_blocks,
        }

    async def _run(
        self, content: bytes, token_ids: list[int], params: FakeSamplingParams
    ) -> AsyncGenerator[DecodeOutput, None]:
        limit = params.max_tokens or self.info.max_model_len - len(token_ids)
        if params.num_emitted and content == kv_content(token_ids):
            content = kv_content(
                token_ids[: -params.num_emitted]
            )  # the prompt's, which decides the answer
        sequence = Sequence(content, params, limit)
        self._check_alive()
        with self._steps.running(sequence):
            while True:
                output = await sequence.next_output()
                self._check_alive()  # what it made in its last step is lost with it
                yield output
                if output.finish_reason is not None:
                    return

    def die(self) -> None:
        """End the engine, and every sequence in it."""
        super().die()
        self._steps.fail(EngineDeadError("the fake engine is dead"))

    def _after_step(self, num_token_ids: int) -> None:
        self._add(num_steps=1)
        left = self.faults.die_after_token_ids
        if left is not None:
            self.faults.die_after_token_ids = max(0, left - num_token_ids)
            if left <= num_token_ids:
                self.die()

    def continuation(self, sampling_params: bytes, num_emitted: int) -> bytes | None:
        """As vLLM's, of what the fake heeds."""
        return continuation(sampling_params, num_emitted)

    async def release_handoff(self, kv_transfer_params: dict[str, Any]) -> None:
        """Tell the prefill engine, if it is still there."""
        check_origin(kv_transfer_params)
        self._check_alive()
        with contextlib.suppress(PullFailedError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S), Pull(kv_transfer_params) as pull:
                await pull.release()

    async def warm_handshake(self, kv_transfer_params: dict[str, Any]) -> None:
        """Do what a release does: the fake has no handshake."""
        check_origin(kv_transfer_params)
        self._check_alive()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S), Pull(kv_transfer_params) as pull:
                await pull.release()
        except (PullFailedError, TimeoutError) as error:
            raise EngineRequestError(
                f"no contact with prefill engine {kv_transfer_params['remote_engine_id']}: {error}"
            ) from None

    async def shutdown(self) -> None:
        """End the engine."""
        self.die()
        await self._steps.stop()
