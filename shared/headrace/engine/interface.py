"""What prefill and decode need from an engine. vLLM implements it, and so does the fake.

Everything here speaks token IDs. An engine never sees text, and a service never sees vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headrace.shared.errors import EngineDeadError, EngineStuckError
from headrace.shared.messages import FinishReason, PromptLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What a started engine is."""

    engine_id: str  #: new with each start; the `remote_engine_id` of its handoffs
    block_size: int  #: token IDs a KV block
    num_blocks: int  #: KV blocks of the engine
    max_model_len: int  #: prompt and answer together, in token IDs
    vocab_size: int  #: every token ID is below this
    block_bytes: int  #: bytes of one KV block, all layers
    lease_s: float  #: how long a handoff's blocks are kept for the pull, in seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an engine is doing, as of its last step."""

    num_running: int = 0  #: requests in the engine, waiting ones included
    num_blocks_free: int = 0  #: KV blocks not held by a request or a lease
    num_steps: int = 0  #: engine steps since the start, also those that only wait for a pull
    num_external_cached_token_ids: int = 0  #: prompt token IDs that came over NIXL since the start
    num_local_computed_token_ids: int = 0  #: prompt token IDs computed here since the start
    kv_transfer_bytes: int = 0  #: bytes read over NIXL since the start
    kv_transfer_s: float = 0.0  #: sum of NIXL's own time for those reads, in seconds
    num_kv_transfers: int = 0  #: reads since the start
    num_failed_kv_transfers: int = (
        0  #: reads, handshakes and notifications that failed since the start
    )
    num_leases: int = 0  #: prefill: handoffs neither pulled, released nor expired
    num_expired_leases: int = 0  #: prefill: handoffs that nobody pulled, since the start


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """A computed prompt, leased to one decode engine."""

    kv_transfer_params: dict[str, Any]  #: vLLM's handle for the pull
    expires: float  #: when the engine may free the blocks (Unix seconds)
    num_cached_token_ids: int  #: found in this engine's own prefix cache
    prompt_logprobs: PromptLogprobs | None = None  #: None: not asked for


class DecodeOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New token IDs of one sequence. The last one has a finish reason."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None  #: None: not finished
    stop_reason: int | str | None = None  #: the stop token ID; None: EOS, or not stopped
    logprobs: list[list[tuple[int, float, int | None]]] | None = None
    """A token ID each: `(token_id, logprob, rank)`, the sampled one first. None: not asked for."""
    num_cached_token_ids: int = 0  #: prompt token IDs that were not computed here
    kv_transfer_s: float | None = None
    """From when this sequence's pull was asked of NIXL until all of it was there, in seconds.

    In the first output only; None: nothing was pulled. So are the four below.
    """
    kv_post_s: float | None = None
    """What of it went by until the read was posted."""
    kv_notice_s: float | None = None
    """From the end of the pull until this output: until the engine knew, and its next step."""
    kv_transfer_bytes: int | None = None
    """Bytes pulled for this sequence."""
    num_kv_descriptors: int | None = None
    """Pieces of memory in which NIXL read them."""
    prompt_logprobs: PromptLogprobs | None = None  #: in the first output only; None: not asked for


class PrefillEngine(Protocol):
    """Computes prompts and leases their KV cache."""

    async def start(self) -> EngineInfo:
        """Load the model. Raises: EngineDeadError when it can't."""
        ...

    async def prefill(
        self,
        task_id: str,
        token_ids: list[int],
        *,
        cache_salt: str | None,
        priority: int,
        prompt_logprobs: int | None = None,
    ) -> PrefillResult:
        """Compute one prompt's KV cache and lease it; with `prompt_logprobs`, all of it anew.

        Cancelling the call aborts the request in the engine.
        Raises: BadRequestError for IDs the engine can't take, EngineRequestError for this request,
        EngineDeadError for all of them.
        """
        ...

    async def drop_lease(self, kv_transfer_params: dict[str, Any]) -> None:
        """Free the blocks of a handoff before its lease ends; only of one that no decode engine can have."""
        ...

    def stats(self) -> EngineStats:
        """Return the counters as of the last step."""
        ...

    async def check_health(self) -> None:
        """Raises: EngineDeadError when the engine is gone."""
        ...

    async def shutdown(self) -> None:
        """End the engine and its processes; safe to call after a failed `start`."""
        ...


class DecodeEngine(Protocol):
    """Generates token IDs, from its own prefill or from KV pulled over NIXL."""

    async def start(self) -> EngineInfo:
        """Load the model. Raises: EngineDeadError when it can't."""
        ...

    def generate(
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
        """Yield the token IDs of one sequence (`n` in `sampling_params` is ignored: always one).

        `kv_transfer_params` is checked for what would kill the engine (`handoff_check`); whether the handoff is
        used, late or foreign is the caller's to know. `seed_offset` is added to a given seed, so that choice i
        of n differs as in vLLM. Closing the generator aborts the sequence. `prompt_logprobs` counts, and not
        that of `sampling_params`; it can't go with `kv_transfer_params`, as a pulled prompt is not computed.
        A failed pull ends with finish reason "error" and no token IDs, one that hangs after `decode.pull_timeout_s`.
        Raises: BadRequestError, HandoffError, EngineRequestError, EngineDeadError.
        """
        ...

    def continuation(self, sampling_params: bytes, num_emitted: int) -> bytes | None:
        """Return the parameters with which an answer goes on behind its first `num_emitted` token IDs.

        They are for a prompt with those IDs behind it. None where that would not be the answer that was begun
        (something looks at the output as such: a grammar, a penalty, a seed), or nothing is left of it.
        Raises: BadRequestError.
        """
        ...

    async def release_handoff(self, kv_transfer_params: dict[str, Any]) -> None:
        """Tell the prefill engine that this handoff will not be pulled, so that it frees the blocks.

        A prefill engine that is gone is no error: it holds nothing. Raises: HandoffError, EngineDeadError.
        """
        ...

    async def warm_handshake(self, kv_transfer_params: dict[str, Any]) -> None:
        """Do NIXL's first contact with a prefill engine before a request needs it; releases the handoff.

        Raises: HandoffError, EngineRequestError when the contact fails, EngineDeadError.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the counters as of the last step."""
        ...

    async def check_health(self) -> None:
        """Raises: EngineDeadError when the engine is gone."""
        ...

    async def shutdown(self) -> None:
        """End the engine and its processes; safe to call after a failed `start`."""
        ...


HEALTH_INTERVAL_S = 1.0


async def watch_engine(
    engine: PrefillEngine | DecodeEngine,
    *,
    stuck_s: float,
    on_dead: Callable[[], Awaitable[None]],
    interval_s: float = HEALTH_INTERVAL_S,
) -> None:
    """Never return while the engine lives; call `on_dead` as soon as it does not.

    Raises: EngineDeadError when it is gone, EngineStuckError when it has made no step for `stuck_s`
    seconds while requests were in it.
    """
    num_steps, still_s = 0, 0.0
    try:
        while True:
            await engine.check_health()
            stats = engine.stats()
            if stats.num_running == 0 or stats.num_steps != num_steps:
                num_steps, still_s = stats.num_steps, 0.0
            elif still_s >= stuck_s:
                raise EngineStuckError(
                    f"no step in {still_s:g} s, though {stats.num_running} requests are in the engine"
                )
            await asyncio.sleep(interval_s)
            # Not by the clock: a process that was stopped for a minute has watched nothing meanwhile.
            still_s += interval_s
    except EngineDeadError:
        await on_dead()
        raise
