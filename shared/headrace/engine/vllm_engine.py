"""Prefill and decode on vLLM's AsyncLLM, with the KV cache moved by NIXL.

Importing this imports vLLM, which takes seconds. Every message is checked before vLLM sees it: a
missing block ID, or a token ID outside the vocabulary, ends vLLM's process and every request in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import headrace.engine.vllm_env  # noqa: F401 - first: it sets what vLLM reads when it is imported
from headrace.engine import vllm_params
from headrace.engine.handoff_check import check_kv_transfer_params, check_origin
from headrace.engine.interface import DecodeOutput, EngineInfo, EngineStats, PrefillResult
from headrace.engine.nixl_worker import PullCost, WorkerCalls
from headrace.engine.request_check import check_prompt, check_prompt_logprobs
from headrace.engine.used_handoffs import UsedHandoffs
from headrace.engine.vllm_errors import translated
from headrace.engine.vllm_pull import Pull
from headrace.engine.vllm_start import EngineProcess
from headrace.shared.errors import EngineDeadError, EngineRequestError
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role
from headrace.shared.tasks import spawn

__all__ = ["VllmDecodeEngine", "VllmPrefillEngine"]

CONTACT_TIMEOUT_S = 15.0  # a dead address alone takes NIXL 5 s to give up
CONTACT_POLL_S = 0.1


class _VllmEngine:
    """What both roles share."""

    def __init__(self, settings: Settings, role: Role) -> None:
        self._process = EngineProcess(settings, role)
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine is. Raises: EngineDeadError before `start`."""
        if self._info is None:
            raise EngineDeadError("the engine was not started")
        return self._info

    async def start(self) -> EngineInfo:
        """Load the model.

        Raises: SettingsError for arguments that vLLM refuses, EngineDeadError when it can't start.
        """
        self._info = await self._process.start()
        return self._info

    def stats(self) -> EngineStats:
        """Return the counters as of the last step; all are 0 before `start`."""
        if self._info is None:
            return EngineStats()
        running = self._process.engine.output_processor.get_num_unfinished_requests()
        return self._process.recorder.stats(running, self.info.num_blocks)

    async def check_health(self) -> None:
        """Raises: EngineDeadError when the engine is gone."""
        with translated():
            await self._process.engine.check_health()

    async def shutdown(self) -> None:
        """End the engine and its processes; with live leases, prefill serves pulls 5 s longer."""
        await self._process.shutdown()


class VllmPrefillEngine(_VllmEngine):
    """Computes prompts and leases their KV cache (`kv_producer`)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Role.PREFILL)
        self._drops: set[asyncio.Task[None]] = set()

    async def prefill(
        self,
        task_id: str,
        token_ids: list[int],
        *,
        cache_salt: str | None,
        priority: int,
        prompt_logprobs: int | None = None,
    ) -> PrefillResult:
        """Compute one prompt's KV cache and lease it. See `PrefillEngine`."""
        check_prompt(token_ids, self.info)
        # A copy of the task may have run, or run yet: what ends this run must not end that one's lease.
        run_id = f"{task_id}-{uuid.uuid4().hex[:8]}"
        last = None
        with translated():
            outputs = self._process.engine.generate(
                vllm_params.prompt(token_ids, cache_salt),
                vllm_params.for_prefill(prompt_logprobs),
                run_id,
                priority=priority,
            )
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        last = output
            except asyncio.CancelledError:
                self._drop_lease(run_id)
                raise
        if last is None or not last.kv_transfer_params:
            reason = last.outputs[0].finish_reason if last else None
            raise EngineRequestError(f"no KV cache was kept for the prompt: it ended with {reason}")
        self._process.recorder.add_lease(last.kv_transfer_params["remote_request_id"])
        return PrefillResult(
            kv_transfer_params=last.kv_transfer_params,
            expires=_finished_at(last.metrics) + self.info.lease_s,
            num_cached_token_ids=last.num_cached_tokens or 0,
            prompt_logprobs=vllm_params.packed_prompt_logprobs(last.prompt_logprobs),
        )

    async def drop_lease(self, kv_transfer_params: dict[str, Any]) -> None:
        """Free the blocks of a handoff that nobody has. See `PrefillEngine`."""
        # vLLM puts a suffix of its own behind the run's name.
        self._drop_lease(kv_transfer_params["remote_request_id"].rpartition("-")[0])

    def _drop_lease(self, run_id: str) -> None:
        """Free what an aborted run may have left: vLLM aborts no request that has just ended."""
        spawn(self._call_drop_lease(run_id), self._drops)

    async def _call_drop_lease(self, run_id: str) -> None:
        with contextlib.suppress(EngineDeadError), translated():
            await self._process.engine.collective_rpc(
                WorkerCalls.headrace_drop_lease.__name__, args=(run_id,)
            )


class VllmDecodeEngine(_VllmEngine):
    """Generates token IDs, from its own prefill or from KV pulled over NIXL (`kv_consumer`)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Role.DECODE)
        self._contacts: set[asyncio.Task[bool]] = set()
        self._used = UsedHandoffs()

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
        """Yield the token IDs of one sequence. See `DecodeEngine`."""
        info = self.info
        check_prompt_logprobs(prompt_logprobs, kv_transfer_params)
        if kv_transfer_params is not None:
            check_kv_transfer_params(
                kv_transfer_params,
                num_prompt_token_ids=len(token_ids),
                block_size=info.block_size,
            )
        params = vllm_params.for_decode(
            sampling_params, kv_transfer_params, seed_offset, prompt_logprobs
        )
        check_prompt(token_ids, info, max_tokens=params.max_tokens)
        with (
            Pull(self._process, self._used, kv_transfer_params, sequence_id) as pull,
            translated(),
        ):
            outputs = self._process.engine.generate(
                vllm_params.prompt(token_ids, cache_salt),
                params,
                sequence_id,
                priority=priority,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    if pull.is_given_up:
                        pull.come("error")
                        yield DecodeOutput(token_ids=[], finish_reason="error")
                        return
                    choice = output.outputs[0]
                    pulled = pull.come(choice.finish_reason)
                    new = list(choice.token_ids)
                    yield DecodeOutput(
                        token_ids=new,
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_reason,
                        logprobs=vllm_params.plain_logprobs(new, choice.logprobs),
                        num_cached_token_ids=output.num_cached_tokens or 0,
                        **_cost(pulled),
                        prompt_logprobs=vllm_params.packed_prompt_logprobs(output.prompt_logprobs),
                    )

    def continuation(self, sampling_params: bytes, num_emitted: int) -> bytes | None:
        """Return the parameters with which an answer goes on. See `DecodeEngine`."""
        return vllm_params.continuation(sampling_params, num_emitted)

    async def release_handoff(self, kv_transfer_params: dict[str, Any]) -> None:
        """Tell the prefill engine to free the blocks; a first contact goes on in the background."""
        check_origin(kv_transfer_params)
        if not self._used.may_release(kv_transfer_params):
            return
        failures = self._process.recorder.num_failures
        await self._refuse(kv_transfer_params)
        if kv_transfer_params["remote_engine_id"] not in self._process.recorder.peers:
            contact = asyncio.create_task(self._contact(kv_transfer_params, failures))
            self._contacts.add(contact)
            contact.add_done_callback(self._forget_contact)

    async def warm_handshake(self, kv_transfer_params: dict[str, Any]) -> None:
        """Do NIXL's first contact with a prefill engine, and release the handoff.

        Raises: HandoffError, EngineRequestError when the contact fails, EngineDeadError.
        """
        check_origin(kv_transfer_params)
        failures = self._process.recorder.num_failures
        await self._refuse(kv_transfer_params)
        if not await self._contact(kv_transfer_params, failures):
            raise EngineRequestError(
                f"NIXL's handshake with prefill engine {kv_transfer_params['remote_engine_id']} at"
                f" {kv_transfer_params['remote_host']}:{kv_transfer_params['remote_port']} failed"
            )

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        for contact in self._contacts:
            contact.cancel()
        await super().shutdown()

    async def _refuse(self, kv_transfer_params: dict[str, Any]) -> None:
        # The block IDs are not read here, but wrong ones would end the engine.
        params = {**kv_transfer_params, "remote_block_ids": [[0]]}
        with translated():
            await self._process.engine.notify_kv_transfer_request_rejected(
                f"refused-{uuid.uuid4().hex}", params
            )

    async def _contact(self, kv_transfer_params: dict[str, Any], failures: int) -> bool:
        """Step the engine until the handshake has succeeded (True) or failed (False).

        A resting engine neither starts a handshake nor sends what waits for its end.
        """
        recorder = self._process.recorder
        deadline = time.monotonic() + CONTACT_TIMEOUT_S
        while time.monotonic() < deadline:
            recorder.changed.clear()
            await self._step()
            if kv_transfer_params["remote_engine_id"] in recorder.peers:
                await self._step()
                return True
            if recorder.num_failures > failures:
                return False
            try:
                await asyncio.wait_for(recorder.changed.wait(), CONTACT_POLL_S)
            except TimeoutError:
                continue
        return False

    async def _step(self) -> None:
        """Let the engine make one token ID of nothing."""
        with translated():
            outputs = self._process.engine.generate(
                vllm_params.prompt([0], None),
                vllm_params.for_step(),
                f"step-{uuid.uuid4().hex}",
            )
            async for _ in outputs:
                pass

    def _forget_contact(self, contact: asyncio.Task[bool]) -> None:
        self._contacts.discard(contact)
        if not contact.cancelled():
            contact.exception()  # a dead engine is told to everybody who asks it for something


def _cost(pulled: PullCost | None) -> dict[str, Any]:
    """Return what a sequence's first output says of its pull."""
    if pulled is None:
        return {}
    return {
        "kv_transfer_s": pulled.post_s + pulled.wire_s,
        "kv_post_s": pulled.post_s,
        # The engine's process is on this host, where all have one monotonic clock.
        "kv_notice_s": max(0.0, time.perf_counter() - pulled.came),
        "kv_transfer_bytes": pulled.num_bytes,
        "num_kv_descriptors": pulled.num_descriptors,
    }


def _finished_at(metrics: Any) -> float:
    """Return when the engine made the last token ID (Unix seconds): from then on the lease runs."""
    last = metrics.last_token_ts if metrics is not None else 0.0
    age = time.monotonic() - last if last else 0.0
    return time.time() - max(0.0, age)
