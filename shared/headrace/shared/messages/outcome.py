"""How a request went: the word for it, the error, and where its time was spent."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "error", "cancelled", "expired"]


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one request spent its time: each stage adds its own fields. None: did not happen, or not measured."""

    accepted: float | None = None
    """When the request was accepted (Unix seconds). Set by render, from the submission."""
    render_queue_s: float | None = None
    """From acceptance until a render worker took it. Set by render."""
    render_s: float | None = None
    """Template and tokenizer. Set by render."""
    decode_queue_s: float | None = None
    """From the job's publication until a decode worker took it. Set by decode."""
    prefill_wait_s: float | None = None
    """From when decode had the job until its engine could begin: with a handoff, or without one. Set by decode."""
    prefill_mode: Literal["remote", "local"] | None = None
    """Where the prompt was computed. Set by decode."""
    prefill_queue_s: float | None = None
    """From the task's publication until a prefill worker took it. Set by prefill."""
    prefill_s: float | None = None
    """The prompt's forward pass. Set by prefill (remote); None when decode computed the prompt."""
    kv_transfer_s: float | None = None
    """From when the read of this request's KV cache was asked of NIXL until all of it was there. Set by decode."""
    kv_transfer_bytes: int | None = None
    """Bytes that NIXL read for this request. Set by decode."""
    first_step_s: float | None = None
    """From then until the first token ID: the KV transfer, or the prompt, and a step. Set by decode."""
    first_token_s: float | None = None
    """From acceptance until decode had the first token ID. Set by decode."""
    decode_s: float | None = None
    """From the first token ID to the last. Set by decode."""
    derender_s: float | None = None
    """CPU time of detokenizing and parsing this request. Set by derender."""
    total_s: float | None = None
    """From acceptance until the terminal was published. Set by derender."""
    num_prompt_token_ids: int | None = None
    """Length of all prompts. Set by render."""
    num_cached_token_ids: int | None = None
    """Prompt token IDs that decode did not compute (prefix cache, or pulled over NIXL). Set by decode."""
    num_output_token_ids: int | None = None
    """Length of all choices. Set by decode."""
    workers: dict[str, str] = {}
    """Role → instance that served it. Each stage adds itself."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses the wire; becomes OpenAI's error body at the edge."""

    code: str
    """A stable word, as `bad_request`; see `errors.py`."""
    message: str
    """What was wrong and what would be right; shown to the caller."""
    http_status: int
    """HTTP status when nothing was sent yet."""
    error_type: str
    """OpenAI's `error.type`."""
    param: str | None = None
    """The request field at fault. None: no single one."""
    retryable: bool = False
    """True: another attempt may succeed."""
