"""One prompt of a request, and the logprobs that may be asked of it."""

from __future__ import annotations

from typing import Any

import msgspec


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of a prompt as one table: a row each token ID but the first, which has none. An array on the wire."""

    width: int
    """Entries a row: the prompt's own token ID, then the likeliest ones, best first; 0 when there are no rows."""
    token_ids: bytes
    """Packed, row by row."""
    logprobs: bytes
    """Little-endian float32, row by row."""
    ranks: bytes
    """Packed: a row each, the rank of the prompt's own token ID in the vocabulary, from 1."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rendered prompt. A chat has one; a completions call has one for each of its prompts."""

    token_ids: bytes
    """Packed token IDs; at least one, at most `max_model_len` - 1. Set by render."""
    sampling_params: bytes
    """vLLM's `SamplingParams` as msgpack. Set by render."""
    cache_salt: str | None = None
    """Keeps prefix-cache entries apart. None: shared. Set by render from the request."""
    reasoning_ended: bool | None = None
    """Whether the prompt already closed the reasoning block. None: no reasoning parser. Set by render."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Passed to the engine's reasoning parser for structured outputs. None: none. Set by render."""
    prompt_logprobs: int | None = None
    """Logprobs of the prompt: so many of the likeliest token IDs at each place, beside its own; -1: the whole
    vocabulary. None: not asked for. Set by render."""
