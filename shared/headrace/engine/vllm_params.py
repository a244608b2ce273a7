"""vLLM's sampling parameters and outputs, in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.logprobs import PromptLogprobs as VllmPromptLogprobs
from vllm.sampling_params import RequestOutputKind

from headrace.engine.vllm_versions import CLIENT_ERRORS, sampling_field
from headrace.shared import prompt_logprobs as packing
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import PromptLogprobs

_decoder = msgspec.msgpack.Decoder(SamplingParams)

_BAD_PARAMS: tuple[type[Exception], ...] = (*CLIENT_ERRORS, msgspec.DecodeError, TypeError)

GREEDY_BELOW = 1e-5
"""vLLM takes a lower temperature for 0."""


def prompt(token_ids: list[int], cache_salt: str | None) -> TokensInput:
    """Return a prompt that vLLM takes as it is."""
    return tokens_input(token_ids, cache_salt=cache_salt)


def for_prefill(prompt_logprobs: int | None = None) -> SamplingParams:
    """Return what computes a prompt and keeps its blocks: one token ID, which nobody reads.

    Of what the client asks for, only `prompt_logprobs` is prefill's to compute.
    """
    return SamplingParams(
        n=1,
        max_tokens=1,
        min_tokens=0,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=prompt_logprobs is not None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": {"do_remote_decode": True}},
    )


def for_step() -> SamplingParams:
    """Return what makes the engine step once."""
    return SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def for_decode(
    data: bytes,
    kv_transfer_params: dict[str, Any] | None,
    seed_offset: int,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the parameters of one choice, of which the engine sends only new token IDs.

    Stop strings stay out: derender finds them. Prompt logprobs are those of `prompt_logprobs`: asked of every
    choice, they would make decode compute the prompt that it pulled, or that the first choice computed.

    Raises: BadRequestError.
    """
    params = _decoded(data)
    params.n = 1
    params.output_kind = RequestOutputKind.DELTA
    params.detokenize = False
    params.stop = []
    params.output_text_buffer_length = 0
    params.prompt_logprobs = prompt_logprobs
    params.flat_logprobs = prompt_logprobs is not None
    # A cached prompt has no logprobs; vLLM sees to it only where the parameters are made.
    params.skip_reading_prefix_cache = prompt_logprobs is not None
    if params.seed is not None:
        params.seed += seed_offset
    extra = {k: v for k, v in (params.extra_args or {}).items() if k != "kv_transfer_params"}
    if kv_transfer_params is not None:
        # A copy, as vLLM changes the dict it is given; and without prefill's own cache hits, which
        # vLLM would report in place of decode's.
        kv = {k: v for k, v in kv_transfer_params.items() if k != "remote_prefill_cached_tokens"}
        extra["kv_transfer_params"] = kv
    params.extra_args = extra or None
    return params


def continuation(data: bytes, num_emitted: int) -> bytes | None:
    """Return the parameters with which an answer goes on behind its first `num_emitted` token IDs, or None.

    A repetition penalty looks at prompt and output alike, and stays as it is. See `DecodeEngine.continuation`.
    Raises: BadRequestError.
    """
    params = _decoded(data)
    if _looks_at_its_output(params):
        return None
    if params.max_tokens is not None:
        params.max_tokens -= num_emitted
        if params.max_tokens < 1:
            return None
    params.min_tokens = max(0, params.min_tokens - num_emitted)
    return msgspec.msgpack.encode(params)


def _looks_at_its_output(params: SamplingParams) -> bool:
    """Whether a token ID depends on which of those before it are the answer's, or on how many there were."""
    extra = {name for name in params.extra_args or () if name != "kv_transfer_params"}
    return bool(
        (params.seed is not None and params.temperature >= GREEDY_BELOW)
        or params.presence_penalty
        or params.frequency_penalty
        or params.structured_outputs
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.repetition_detection
        or params.prompt_logprobs is not None
        or sampling_field(params, "watermarking")
        or sampling_field(params, "trace_decode_token_ids")
        or extra  # a logits processor may heed them
    )


def _decoded(data: bytes) -> SamplingParams:
    try:
        return _decoder.decode(data)
    except _BAD_PARAMS as error:
        raise BadRequestError(f"sampling_params are no SamplingParams: {error}") from error


def plain_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None
) -> list[list[tuple[int, float, int | None]]] | None:
    """Return `(token_id, logprob, rank)` for each token ID, the sampled one first."""
    if logprobs is None:
        return None
    return [
        [
            (token_id, entry.logprob, entry.rank)
            for token_id, entry in sorted(found.items(), key=lambda item: item[0] != sampled)
        ]
        for sampled, found in zip(token_ids, logprobs, strict=True)
    ]


def packed_prompt_logprobs(logprobs: VllmPromptLogprobs | None) -> PromptLogprobs | None:
    """Return the logprobs of a prompt as a table; None where vLLM gives none.

    Flat ones have every entry of a row, while a dict has but one where the prompt's own ID is a likeliest one.
    """
    if not logprobs:
        return None
    assert isinstance(logprobs, FlatLogprobs)  # what `for_prefill` and `for_decode` ask for
    num_rows = len(logprobs) - 1
    width = len(logprobs.token_ids) // num_rows if num_rows else 1
    ranks = [rank or 0 for rank in logprobs.ranks[::width]]
    return packing.pack(logprobs.token_ids, logprobs.logprobs, ranks, num_rows=num_rows)
