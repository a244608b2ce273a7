"""A file is cut into parts as it comes: few bytes in memory, lines whole where that can be."""

from __future__ import annotations

import pytest

from headrace.shared.errors import BrokerError
from headrace.shared.files import FileWriter

from ..memory_files import MemoryFiles


def stored(store: MemoryFiles) -> list[bytes]:
    return [part.data for part in store.files.get("f", ())]


@pytest.mark.parametrize("piece", [1, 7, 100, 101, 1_000])
async def test_parts_are_of_whole_lines_and_none_is_too_large(piece: int) -> None:
    content = b"".join(b"%d" % number + b"x" * 25 + b"\n" for number in range(100))
    store = MemoryFiles()
    async with FileWriter(store, "t", "f") as writer:
        for start in range(0, len(content), piece):
            await writer.write(content[start : start + piece])
            held = writer.num_bytes - sum(map(len, stored(store)))
            assert held < store.part_bytes
    assert b"".join(stored(store)) == content
    assert all(len(part) <= 100 and part.endswith(b"\n") for part in stored(store))
    assert (writer.num_bytes, writer.num_parts) == (len(content), len(stored(store)))


async def test_what_has_no_lines_is_cut_all_the_same() -> None:
    store = MemoryFiles()
    async with FileWriter(store, "t", "f") as writer:
        await writer.write(b"x" * 250)
    assert list(map(len, stored(store))) == [100, 100, 50]


async def test_a_writer_that_fails_deletes_what_it_stored_and_says_why_it_failed() -> None:
    store = MemoryFiles()
    writer = FileWriter(store, "t", "f")

    async def write() -> None:
        async with writer:
            await writer.write(b"x" * 150)
            store.is_away = True  # the last part can't be stored, nor the first one removed

    with pytest.raises(BrokerError, match="away"):
        await write()
    assert (store.num_deletes, writer.has_left) == (1, True)
