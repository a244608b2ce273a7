"""In how many pieces NIXL would move a prompt, on vLLM's own block pool; needs vLLM's types, but no engine."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

NUM_BLOCKS = 3_400
CHUNK = 64  # blocks that prefill asks for at a time
LENGTHS = (8, 64, 235)
NUM_PROMPTS = 300


def make_pool(*, is_ordered: bool = True, caches: bool = True, num_blocks: int = NUM_BLOCKS) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    import headrace.engine.vllm_env  # noqa: F401
    from headrace.engine.vllm_block_order import keep_side_by_side

    pool = BlockPool(num_blocks, caches, 128)
    if is_ordered:
        keep_side_by_side(pool)
    return pool


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def cached(pool: Any, blocks: list[Any]) -> list[Any]:
    """Let the pool's prefix cache know blocks, as those of a prompt that nobody had before."""
    if pool.enable_caching:
        for block in blocks:
            key = random.randbytes(36)
            block.set_block_hash(key, num_tokens=128)
            pool.cached_block_hash_to_block.insert(key, block)
    return blocks


def num_pieces(remote: list[int], local: list[int]) -> int:
    """Count what NIXL makes of pairs of blocks, of one layer."""
    pairs = np.array([local, remote]).T
    return 1 + int(np.any(np.diff(pairs, axis=0) != 1, axis=1).sum())


def churn(num_running: int, **pools: bool) -> list[int]:
    """Return the pieces of each prompt while answers of changing length come and go on the decode side."""
    chance = random.Random(0)
    prefill, decode = make_pool(**pools), make_pool(**pools)
    running: list[list[Any]] = []
    pieces = []
    for _ in range(NUM_PROMPTS):
        length = chance.choice(LENGTHS)
        while len(running) >= num_running:
            decode.free_blocks(reversed(running.pop(chance.randrange(len(running)))))
        computed: list[Any] = []
        while len(computed) < length:
            computed += prefill.get_new_blocks(min(CHUNK, length - len(computed)))
        pulled = decode.get_new_blocks(length)
        pieces.append(num_pieces(ids(computed), ids(pulled)))
        cached(prefill, computed[:-1])
        prefill.free_blocks(reversed(computed))
        running.append(cached(decode, pulled[:-1]) + pulled[-1:])
        for blocks in running:
            if chance.random() < 0.5:
                blocks += cached(decode, decode.get_new_blocks(1))
    return pieces[NUM_PROMPTS // 2 :]


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_running", [1, 16])
def test_a_prompt_moves_in_a_tenth_of_the_pieces_while_requests_come_and_go(
    num_running: int, caches: bool
) -> None:
    before = churn(num_running, is_ordered=False, caches=caches)
    after = churn(num_running, caches=caches)
    assert sum(after) * 10 < sum(before)
    assert max(after) <= 50


@pytest.mark.parametrize("caches", [True, False])
def test_prompts_one_by_one_have_their_blocks_side_by_side(caches: bool) -> None:
    assert max(churn(1, caches=caches)) <= 12
    pool = make_pool(caches=False)
    for _ in range(3):
        blocks = pool.get_new_blocks(64)
        assert all(right - left == 1 for left, right in pairwise(ids(blocks)))
        pool.free_blocks(reversed(blocks))


def test_neighbours_are_not_taken_from_young_prefixes() -> None:
    pool = make_pool(num_blocks=801)
    blocks = pool.get_new_blocks(800)
    old = cached(pool, [block for block in blocks[:200] if block.block_id % 4])  # in runs of 3
    young = cached(pool, blocks[200:])
    for freed in (old, young):
        pool.free_blocks(freed)
    pool.get_new_blocks(100)
    # To choose from: the 100 that are wanted, and an eighth of the 750 free ones beyond.
    assert all(block.block_hash is not None for block in young[193 - len(old) :])
    assert sum(block.block_hash is None for block in young) == 193 - len(old)


def test_every_block_is_given_out_once() -> None:
    pool = make_pool(num_blocks=101)
    first = pool.get_new_blocks(30)
    pool.free_blocks(first[::3])
    rest = [*pool.get_new_blocks(3), *pool.get_new_blocks(77)]
    assert pool.get_num_free_blocks() == 0
    assert sorted(ids(rest) + ids([b for i, b in enumerate(first) if i % 3])) == list(range(1, 101))


def test_the_connector_takes_the_pool_that_vllm_gives_it() -> None:
    pool = make_pool(is_ordered=False)
    from headrace.engine.nixl_connector import HeadraceNixlConnector
    from headrace.engine.vllm_block_order import SideBySideQueue

    HeadraceNixlConnector.__new__(HeadraceNixlConnector).bind_gpu_block_pool(pool)
    assert isinstance(pool.free_block_queue, SideBySideQueue)
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
