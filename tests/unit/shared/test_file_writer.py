"""A file is cut into parts as it comes: few bytes in memory, lines whole where that can be."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import pytest

from headrace.shared.errors import BrokerError
from headrace.shared.files import FileWriter, Part


class Store:
    """Keeps the parts; parts of 100 bytes."""

    part_bytes = 100

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.num_deletes = 0
        self.is_away = False

    async def append_part(
        self,
        tenant: str,
        file_id: str,
        number: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if self.is_away:
            raise BrokerError("away")
        assert number == len(self.stored)
        self.stored.append(data)

    async def parts(
        self, tenant: str, file_id: str, *, start: int = 0, num_parts: int | None = None
    ) -> AsyncGenerator[Part]:
        raise NotImplementedError
        yield

    async def delete(self, tenant: str, file_id: str) -> None:
        self.num_deletes += 1
        if self.is_away:
            raise BrokerError("away")


@pytest.mark.parametrize("piece", [1, 7, 100, 101, 1_000])
async def test_parts_are_of_whole_lines_and_none_is_too_large(piece: int) -> None:
    content = b"".join(b"%d" % number + b"x" * 25 + b"\n" for number in range(100))
    store = Store()
    async with FileWriter(store, "t", "f") as writer:
        for start in range(0, len(content), piece):
            await writer.write(content[start : start + piece])
            held = writer.num_bytes - sum(map(len, store.stored))
            assert held < store.part_bytes
    assert b"".join(store.stored) == content
    assert all(len(part) <= 100 and part.endswith(b"\n") for part in store.stored)
    assert (writer.num_bytes, writer.num_parts) == (len(content), len(store.stored))


async def test_what_has_no_lines_is_cut_all_the_same() -> None:
    store = Store()
    async with FileWriter(store, "t", "f") as writer:
        await writer.write(b"x" * 250)
    assert list(map(len, store.stored)) == [100, 100, 50]


async def test_a_writer_that_fails_deletes_what_it_stored_and_says_why_it_failed() -> None:
    store = Store()
    writer = FileWriter(store, "t", "f")

    async def write() -> None:
        async with writer:
            await writer.write(b"x" * 150)
            store.is_away = True  # the last part can't be stored, nor the first one removed

    with pytest.raises(BrokerError, match="away"):
        await write()
    assert (store.num_deletes, writer.has_left) == (1, True)
