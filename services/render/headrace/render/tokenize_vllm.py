"""The step of vLLM's renderer from text to token IDs, with what was tokenized before remembered.

Everything around the step (template, limits, truncation, errors) stays vLLM's own. A text that the pieces can't give
exactly as vLLM would have it goes to vLLM's own step.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tokenizers import Tokenizer
from transformers import TokenizersBackend

from headrace.render import cache_salt, cuts, cuts_check
from headrace.render.cuts import Cuts
from headrace.render.piece_cache import PieceCache, key_of
from headrace.shared import metrics

logger = logging.getLogger(__name__)

#: Where a class may get the methods from that lead from text to token IDs: all else may do more than the library does.
_KNOWN_MODULES = (
    "transformers.tokenization_utils_tokenizers",
    "transformers.tokenization_utils_base",
    "vllm.tokenizers.hf",
)
_METHODS = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")

#: whose entries may be used here; None: nobody's, so that vLLM tokenizes the whole text
_scope: ContextVar[bytes | None] = ContextVar("scope", default=None)


@contextmanager
def entries_of(tenant: str, own_salt: str | None) -> Iterator[None]:
    """Let what is rendered within use, and add to, what requests of this tenant with this salt have left."""
    token = _scope.set(cache_salt.salt(tenant, own_salt).encode())
    try:
        yield
    finally:
        _scope.reset(token)


def install(renderer: Any, max_bytes: int) -> bool:
    """Let vLLM's renderer remember token IDs in so much memory; return whether its tokenizer allows it."""
    tokenizer = renderer.get_tokenizer()
    reason = _refusal(tokenizer)
    if not reason:
        cut = Cuts(cuts.cut_tokens(tokenizer.backend_tokenizer))
        step = _Step(renderer, cut, PieceCache(max_bytes))
        if cuts_check.holds(cut, step.token_ids_of, tokenizer.backend_tokenizer):
            renderer._tokenize_prompt_async = step
            return True
        reason = "pieces of texts gave other token IDs than the whole"
    logger.warning(
        "no render cache for this tokenizer: %s", reason, extra={"action": "render_no_cache"}
    )
    return False


def _refusal(tokenizer: Any) -> str:
    """Return why texts can't be cut for this tokenizer; empty: they can."""
    if not isinstance(tokenizer, TokenizersBackend):
        return f"it is no tokenizer of the tokenizers library, but {type(tokenizer).__name__}"
    if type(tokenizer.backend_tokenizer) is not Tokenizer:
        return f"its backend is {type(tokenizer.backend_tokenizer).__name__}"
    for method in _METHODS:
        for base in type(tokenizer).__mro__:
            if method in vars(base) and base.__module__ not in _KNOWN_MODULES:
                return f"{base.__name__} has a {method} of its own"
    if tokenizer.split_special_tokens:
        return "it takes special tokens apart"
    return cuts.refusal(tokenizer.backend_tokenizer)


class _Step:
    """Stands in the place of `_tokenize_prompt_async` of one renderer."""

    def __init__(self, renderer: Any, cut: Cuts, cache: PieceCache) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.get_tokenizer()
        self._adds_special = self._tokenizer.num_special_tokens_to_add() > 0
        self._cut = cut
        self._cache = cache
        self._whole = renderer._tokenize_prompt_async

    async def __call__(self, prompt: Any, params: Any) -> Any:
        scope = _scope.get()
        if scope is None or not self._is_plain(prompt, params):
            return await self._whole(prompt, params)
        try:
            text = prompt["prompt"].encode()
        except UnicodeEncodeError:  # half a character: vLLM's words for it
            return await self._whole(prompt, params)
        loop = asyncio.get_running_loop()  # vLLM's own step runs on the same thread
        token_ids = await loop.run_in_executor(
            self._renderer._executor, self._token_ids, text, scope
        )
        # A prompt that is too long is refused by its length, which vLLM does not count any further than this.
        max_length = params.get_encode_kwargs()["max_length"]
        if max_length is not None and len(token_ids) > max_length:
            del token_ids[max_length:]
        return self._renderer._build_tokens_prompt(token_ids, prompt)

    def _is_plain(self, prompt: Any, params: Any) -> bool:
        """Whether nothing but the text's own token IDs is asked for."""
        return (
            params.truncate_prompt_tokens is None
            and not (params.add_special_tokens and self._adds_special)
            and not self._renderer._wants_offsets(prompt, params)
        )

    def _token_ids(self, text: bytes, scope: bytes) -> list[int]:
        pieces = self._cut.pieces(text)
        keys = [key_of(piece, scope) for piece in pieces]
        found = self._cache.get(keys)
        missing = {
            key: piece for key, piece, ids in zip(keys, pieces, found, strict=True) if ids is None
        }
        made = dict(zip(missing, self.token_ids_of(list(missing.values())), strict=True))
        for key, token_ids in made.items():
            self._cache.put(key, token_ids)
        result: list[int] = []
        num_found = 0
        for key, ids in zip(keys, found, strict=True):
            if ids is not None:
                num_found += len(ids)
            result.extend(made[key] if ids is None else ids)
        metrics.RENDER_CACHE_QUERIES.inc(len(result))
        metrics.RENDER_CACHE_HITS.inc(num_found)
        return result

    def token_ids_of(self, pieces: list[bytes]) -> list[array[int]]:
        """Return the token IDs of each piece of text by itself, as vLLM's tokenizer gives them."""
        if not pieces:
            return []
        encoded = self._tokenizer(
            [piece.decode() for piece in pieces],
            add_special_tokens=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [array("I", token_ids) for token_ids in encoded["input_ids"]]
