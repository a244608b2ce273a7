"""vLLM's sampling parameters and outputs, in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind

from headrace.shared.errors import BadRequestError

_decoder = msgspec.msgpack.Decoder(SamplingParams)


def prompt(token_ids: list[int], cache_salt: str | None) -> TokensInput:
    """Return a prompt that vLLM takes as it is."""
    return tokens_input(token_ids, cache_salt=cache_salt)


def for_prefill() -> SamplingParams:
    """Return what computes a prompt and keeps its blocks: one token ID, which nobody reads."""
    return SamplingParams(
        n=1,
        max_tokens=1,
        min_tokens=0,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": {"do_remote_decode": True}},
    )


def for_step() -> SamplingParams:
    """Return what makes the engine step once."""
    return SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def for_decode(
    data: bytes, kv_transfer_params: dict[str, Any] | None, seed_offset: int
) -> SamplingParams:
    """Return the parameters of one choice, of which the engine sends only new token IDs.

    Stop strings stay out: derender finds them. So do prompt logprobs: they would make decode compute
    the prompt that it pulled.

    Raises: BadRequestError.
    """
    try:
        params = _decoder.decode(data)
    except (msgspec.DecodeError, VLLMClientError, ValueError, TypeError) as error:
        raise BadRequestError(f"sampling_params are no SamplingParams: {error}") from error
    params.n = 1
    params.output_kind = RequestOutputKind.DELTA
    params.detokenize = False
    params.stop = []
    params.output_text_buffer_length = 0
    if params.prompt_logprobs is not None:
        params.prompt_logprobs = None
        params.skip_reading_prefix_cache = None
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
