"""What the render cache keeps, and for whom."""

from __future__ import annotations

import sys
from array import array
from concurrent.futures import ThreadPoolExecutor

from headrace.render.piece_cache import ENTRY_BYTES, PieceCache, key_of

IDS = array("I", range(100))
SIZE = ENTRY_BYTES + 400


def test_what_was_used_last_is_kept() -> None:
    cache = PieceCache(3 * SIZE)
    for key in (b"a", b"b", b"c"):
        cache.put(key, IDS)
    assert cache.get([b"a"]) == [IDS]
    cache.put(b"d", IDS)
    assert cache.get([b"a", b"b", b"c", b"d"]) == [IDS, None, IDS, IDS]


def test_the_bound_holds_and_counts_what_an_entry_takes_beside_its_token_ids() -> None:
    cache = PieceCache(10 * SIZE)
    for number in range(1000):
        cache.put(b"%032d" % number, array("I", range(number % 200)))
        assert cache.num_bytes <= 10 * SIZE
    key, ids = b"k" * 32, array("I")
    assert ENTRY_BYTES >= sys.getsizeof(key) + sys.getsizeof(ids) + 8 * 8  # a table's entry


def test_an_entry_that_is_too_large_takes_nobodys_place() -> None:
    cache = PieceCache(2 * SIZE)
    cache.put(b"a", IDS)
    cache.put(b"b", array("I", range(1000)))
    assert cache.get([b"a", b"b"]) == [IDS, None]


def test_an_entry_that_is_put_again_counts_once() -> None:
    cache = PieceCache(2 * SIZE)
    for _ in range(5):
        cache.put(b"a", IDS)
    assert cache.num_bytes == SIZE


def test_the_same_text_has_another_key_for_somebody_else() -> None:
    keys = {key_of(text, scope) for text in (b"x", b"y", b"") for scope in (b"a", b"b", b"a" * 32)}
    assert len(keys) == 9
    assert key_of(b"x", b"a") == key_of(b"x", b"a")


def test_threads_share_it() -> None:
    cache = PieceCache(50 * SIZE)

    def use(thread: int) -> None:
        keys = [b"%d" % (number % 80) for number in range(thread, thread + 80)]
        for number in range(20_000):
            cache.put(keys[number % 80], IDS)
            if thread % 40:
                assert all(found in (IDS, None) for found in cache.get(keys[:9]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a call
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, (0, 20, 40, 60), timeout=120))
    finally:
        sys.setswitchinterval(interval)
    assert cache.num_bytes == 50 * SIZE
