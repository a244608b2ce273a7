"""What a prompt must be so that an engine survives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.interface import EngineInfo
from headrace.shared.errors import BadRequestError


def check_prompt(token_ids: Sequence[int], info: EngineInfo, *, max_tokens: int | None = 1) -> None:
    """Check a prompt's length and token IDs; `max_tokens` None: all that is left of the context.

    Raises: BadRequestError. An ID outside the vocabulary would otherwise index past the embedding.
    """
    if not token_ids:
        raise BadRequestError("the prompt is empty: it needs at least one token ID", param="prompt")
    length = len(token_ids)
    if length + (max_tokens or 1) > info.max_model_len:
        raise BadRequestError(
            f"{length} prompt token IDs and max_tokens {max_tokens or 1} exceed max_model_len"
            f" {info.max_model_len}; shorten the prompt or lower max_tokens",
            param="prompt" if length >= info.max_model_len else "max_tokens",
        )
    # Two passes in C instead of one in Python: a prompt may have 100,000 IDs.
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= info.vocab_size:
        raise BadRequestError(
            f"token ID {low if low < 0 else high} is outside the vocabulary"
            f" (0 to {info.vocab_size - 1})",
            param="prompt",
        )


def check_prompt_logprobs(asked: int | None, kv_transfer_params: dict[str, Any] | None) -> None:
    """Check that logprobs of the prompt are asked of the engine that computes it.

    Raises: BadRequestError. With them, vLLM's decode engine ignores the KV cache that it was to pull.
    """
    if asked is not None and kv_transfer_params is not None:
        raise BadRequestError(
            "prompt_logprobs can't go with kv_transfer_params: ask the engine that computes the prompt",
            param="prompt_logprobs",
        )
