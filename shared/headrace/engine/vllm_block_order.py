"""KV blocks that lie side by side: which free blocks vLLM gives to a prompt, and in which order.

NIXL moves blocks that are neighbours on both sides as one piece of memory. vLLM gives free blocks out in the order
in which they were freed, and frees a request's last block first: a prompt's blocks run backwards or lie scattered.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.block_pool import BlockPool

MIN_BLOCKS = 4
"""Fewer are taken as they come: what single blocks are left over serves the growth of answers."""
WINDOW = 4
"""Blocks to choose from, for each block that is wanted: those that would be evicted next."""
MAX_SHARE = 8
"""At most this part of the pool is chosen from beyond what is wanted; the younger prefixes stay cached."""


class SideBySideQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's queue of free blocks, which gives a prompt neighbours from among the first in the queue."""

    def popleft_n(self, n: int) -> list[Any]:
        """Take `n` blocks, in the order of their IDs; the pool has seen that there are so many."""
        if n < MIN_BLOCKS:
            return list(super().popleft_n(n))
        beyond = min(n * (WINDOW - 1), self.num_free_blocks // MAX_SHARE)
        chosen = neighbours(list(islice(self._in_order(), n + beyond)), n)
        for block in chosen:
            self.remove(block)
        return chosen

    def _in_order(self) -> Iterator[Any]:
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block


def neighbours(blocks: list[Any], n: int) -> list[Any]:
    """Return `n` of the blocks in as few runs of neighbours as can be, by ID."""
    runs = sorted(_runs(sorted(blocks, key=_block_id)), key=len)
    chosen: list[Any] = []
    while (missing := n - len(chosen)) > len(runs[-1]):
        chosen += runs.pop()
    smallest = runs[bisect_left(runs, missing, key=len)]
    chosen += smallest[:missing]
    return sorted(chosen, key=_block_id)


def keep_side_by_side(pool: BlockPool) -> None:
    """Let a pool hand out its blocks in this way from now on."""
    queue = SideBySideQueue.__new__(SideBySideQueue)
    queue.__dict__.update(pool.free_block_queue.__dict__)
    pool.free_block_queue = queue


def _runs(blocks: list[Any]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for block in blocks:
        if runs and block.block_id == runs[-1][-1].block_id + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _block_id(block: Any) -> int:
    return int(block.block_id)
