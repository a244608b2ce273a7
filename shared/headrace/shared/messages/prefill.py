"""Getting a prompt computed: what decode and prefill say to each other."""

from __future__ import annotations

from typing import Any

from headrace.shared.messages.outcome import Failure
from headrace.shared.messages.prompt import PromptLogprobs
from headrace.shared.subjects import Lane
from headrace.shared.wire import Message


class PrefillTask(Message, frozen=True, tag="prefill.v1"):
    """One prompt to compute: decode → prefill."""

    task_id: str
    """Names this attempt; the handoff must carry it back. Set by decode, new for each attempt."""
    request_id: str
    """The request it is for."""
    tenant: str
    """The request's tenant, so that a cancel is heard."""
    decode_instance: str
    """Who asked: the answer goes to `kv.<decode_instance>`."""
    published: float
    """When decode published the task (Unix seconds)."""
    expires: float
    """After this nobody waits for the answer (Unix seconds)."""
    contract: str
    """Must equal the prefill worker's."""
    token_ids: bytes
    """The prompt, packed."""
    prompt_hash: str
    """`token_ids.prompt_hash` of IDs, salt and adapter; 32 hex digits."""
    cache_salt: str | None = None
    """As in the job."""
    lane: Lane = Lane.RT
    """As in the job."""
    priority: int = 0
    """vLLM's scheduling priority: lower runs earlier; the lane's part is in it."""
    prompt_logprobs: int | None = None
    """As in the job; the handoff must bring them. None: not asked for."""
    traceparent: str | None = None
    """W3C trace context of decode's wait for the answer. None: not traced."""


class PrefillStarted(Message, frozen=True, tag="started.v1"):
    """The task was taken, and is being computed: prefill → decode, as a request. From then on decode watches it."""

    task_id: str
    """The task."""
    request_id: str
    """The request it is for."""
    prefill_instance: str
    """Who took it."""


class PrefillNoted(Message, frozen=True, tag="noted.v1"):
    """Decode has it: decode → prefill, as the reply to what prefill says of a task."""

    wanted: bool
    """False: nobody waits for this task any more, or another worker computes it."""


class Handoff(Message, frozen=True, tag="handoff.v1"):
    """The prompt's KV cache is ready to be pulled, once: prefill → decode."""

    task_id: str
    """The task that it answers; decode takes the first and refuses the rest."""
    request_id: str
    """The request it is for."""
    prefill_instance: str
    """Who computed it."""
    epoch: str
    """vLLM's `engine_id` of that worker's engine: new with each start."""
    contract: str
    """The prefill worker's contract."""
    prompt_hash: str
    """Of the prompt that was computed."""
    expires: float
    """When prefill may free the blocks (Unix seconds); decode must pull well before."""
    kv_transfer_params: dict[str, Any]
    """vLLM's handle for the pull. Opaque, but for what decode checks."""
    prefill_queue_s: float
    """From the task's publication until it was taken."""
    prefill_s: float
    """The forward pass."""
    num_cached_token_ids: int = 0
    """Prompt token IDs found in prefill's own prefix cache."""
    prompt_logprobs: PromptLogprobs | None = None
    """What the task asked for. None: nothing."""


class PrefillFailed(Message, frozen=True, tag="prefill_failed.v1"):
    """The prompt was not computed: prefill → decode."""

    task_id: str
    """The task that it answers."""
    request_id: str
    """The request it is for."""
    prefill_instance: str
    """Who gave up."""
    failure: Failure
    """Why."""


class Handshake(Message, frozen=True, tag="handshake.v1"):
    """Asks for a handoff of one token ID, to make NIXL's first contact with: decode → one prefill worker."""

    decode_instance: str
    """Who asks."""
    contract: str
    """Must equal the prefill worker's."""
