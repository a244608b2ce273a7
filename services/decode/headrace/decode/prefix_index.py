"""A guess at what decode's own prefix cache holds, without asking the engine."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from headrace.shared.token_ids import TOKEN_ID_BYTES


class PrefixIndex:
    """Remembers the block hashes of the latest prompts, at most as many as the engine has KV blocks.

    Hashes are chained as in vLLM's prefix cache: a block is found only behind the same prefix. It is a
    guess (the engine may have evicted a block); being wrong costs a local prefill, never a wrong answer.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_bytes = block_size * TOKEN_ID_BYTES
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_cached(self, token_ids: bytes, cache_salt: str | None) -> int:
        """Return how many leading token IDs of a packed prompt are probably cached."""
        cached = 0
        for block in self._hashes(token_ids, cache_salt):
            if block not in self._blocks:
                break
            cached += self._block_size
        return cached

    def add(self, token_ids: bytes, cache_salt: str | None) -> None:
        """Remember a prompt that decode has computed or pulled."""
        for block in self._hashes(token_ids, cache_salt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def _hashes(self, token_ids: bytes, cache_salt: str | None) -> list[bytes]:
        parent = (cache_salt or "").encode()
        hashes = []
        for start in range(0, len(token_ids) - self._block_bytes + 1, self._block_bytes):
            block = token_ids[start : start + self._block_bytes]
            parent = blake2b(parent + block, digest_size=16).digest()
            hashes.append(parent)
        return hashes
