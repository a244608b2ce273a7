"""What the fake engine answers: readable words that depend on the prompt and the seed alone.

A token ID is a byte of the answer; ID 256 ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Any

import msgspec

from headrace.shared import prompt_logprobs as packing
from headrace.shared import token_ids as ids
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import FinishReason, PromptLogprobs

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257

_WORDS = (
    "water river mill wheel stone gate pond weir reed otter heron bridge bank stream lock barge "
    "flows turns falls rises waits runs carries fills slowly quickly under over beside behind again "
    "still"
).split()


class FakeSamplingParams(msgspec.Struct, kw_only=True):
    """The part of vLLM's `SamplingParams` that the fake heeds; names and defaults are vLLM's."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    temperature: float = 1.0
    logprobs: int | None = None
    num_emitted: int = 0
    """The fake's own: so many of the prompt's last token IDs are the beginning of the answer (`continuation`)."""


_decoder = msgspec.msgpack.Decoder(FakeSamplingParams)


def decode_sampling_params(data: bytes) -> FakeSamplingParams:
    """Return what the fake needs of vLLM's `SamplingParams` in msgpack.

    Raises: BadRequestError.
    """
    try:
        params = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"sampling_params are no SamplingParams: {error}") from None
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequestError(
            f"max_tokens must be at least 1, got {params.max_tokens}", param="max_tokens"
        )
    return params


def continuation(data: bytes, num_emitted: int) -> bytes | None:
    """Return the parameters with which an answer goes on behind its first `num_emitted` token IDs.

    None where vLLM's would not be the same answer, or nothing is left of it. Raises: BadRequestError.
    """
    params = decode_sampling_params(data)
    if params.seed is not None and params.temperature > 0:
        return None
    if params.max_tokens is not None:
        params.max_tokens -= num_emitted
        if params.max_tokens < 1:
            return None
    params.min_tokens = max(0, params.min_tokens - num_emitted)
    params.num_emitted += num_emitted
    return msgspec.msgpack.encode(params)


def kv_content(prompt_token_ids: Iterable[int]) -> bytes:
    """Return what a prompt leaves in the KV cache: 16 bytes that stand for it."""
    return blake2b(ids.pack(prompt_token_ids), digest_size=16).digest()


def answer(
    content: bytes, params: FakeSamplingParams, max_tokens: int
) -> Iterator[tuple[int, FinishReason | None, int | None]]:
    """Yield token ID, finish reason and stop reason of an answer to what the KV cache holds.

    At most `max_tokens`; of a continuation, those behind what was emitted.
    """
    stops: Collection[int] = params.stop_token_ids or ()
    min_tokens, last = params.min_tokens + params.num_emitted, max_tokens + params.num_emitted
    stream = _token_ids(content, params.seed, 0 if params.ignore_eos else None, min_tokens)
    for count, token_id in enumerate(
        islice(stream, params.num_emitted, last), params.num_emitted + 1
    ):
        if token_id == EOS_TOKEN_ID:
            yield token_id, "stop", None
        elif token_id in stops and count >= min_tokens:
            yield token_id, "stop", token_id
        elif count == last:
            yield token_id, "length", None
        else:
            yield token_id, None, None
            continue
        return


def expected_output(
    prompt_token_ids: Iterable[int], max_tokens: int, **sampling_params: Any
) -> list[int]:
    """Return the token IDs that a right answer to this prompt has, EOS included; for tests.

    `sampling_params` are `FakeSamplingParams`' other fields, as `seed` or `ignore_eos`.
    """
    params = FakeSamplingParams(max_tokens=max_tokens, **sampling_params)
    return [token_id for token_id, _, _ in answer(kv_content(prompt_token_ids), params, max_tokens)]


def expected_prompt_logprobs(token_ids: list[int], asked: int | None) -> PromptLogprobs | None:
    """Return the logprobs that a prompt has here; None when nobody asks.

    Each token ID's depends on itself and on the one before it; -1 asks for the whole vocabulary.
    """
    if asked is None:
        return None
    num_others = VOCAB_SIZE if asked == -1 else asked
    rows = [
        [(own, -((before * 31 + own) % 64) / 8), *((i, -(i + 1) / 8) for i in range(num_others))]
        for before, own in pairwise(token_ids)
    ]
    entries = [entry for row in rows for entry in row]
    return packing.pack(
        [token_id for token_id, _ in entries],
        [logprob for _, logprob in entries],
        [1 + own % 50 for own in token_ids[1:]],
        num_rows=len(rows),
    )


def _token_ids(
    content: bytes, seed: int | None, num_words: int | None, min_tokens: int
) -> Iterator[int]:
    """Yield words byte by byte, then EOS; `num_words` 0: never EOS, None: as many as the content says."""
    key = content + (b"" if seed is None else str(seed).encode())
    if num_words is None:
        num_words = 4 + blake2b(key, digest_size=1).digest()[0] % 12
    count = index = 0
    while True:
        if num_words and index >= num_words and count >= min_tokens:
            yield EOS_TOKEN_ID
            return
        choice = blake2b(key + index.to_bytes(4, "little"), digest_size=2).digest()
        word = _WORDS[int.from_bytes(choice, "little") % len(_WORDS)]
        text = word.capitalize() if index == 0 else f" {word}"
        for byte in text.encode():
            count += 1
            yield byte
        index += 1
