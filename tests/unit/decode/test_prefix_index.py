"""The guess at decode's prefix cache."""

from __future__ import annotations

from headrace.decode.prefix_index import PrefixIndex
from headrace.shared.token_ids import pack


def test_only_whole_blocks_of_a_known_prefix_count() -> None:
    index = PrefixIndex(block_size=4, num_blocks=10)
    index.add(pack(range(10)), None)
    assert index.num_cached(pack([*range(8), 99, 99, 99, 99]), None) == 8
    assert index.num_cached(pack([99, *range(1, 10)]), None) == 0
    assert index.num_cached(pack(range(10)), "salt") == 0


def test_the_oldest_blocks_go_first() -> None:
    index = PrefixIndex(block_size=1, num_blocks=3)
    index.add(pack([1, 2]), None)
    index.add(pack([3, 4]), None)
    assert index.num_cached(pack([1, 2]), None) == 0
    assert index.num_cached(pack([3, 4]), None) == 2
