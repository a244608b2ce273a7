"""The content of a file as a response: what of it is sent, and that nothing is read for a client that has left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.gateway.files_content import ContentResponse, range_of
from headrace.shared.batches import FileRecord

from ..memory_files import MemoryFiles

TEN_PARTS = [b"%d" % number * 10 for number in range(10)]


class Client:
    """What the server is to the response; it leaves after so many pieces."""

    def __init__(self, leaves_after: int) -> None:
        self.pieces: list[bytes] = []
        self.is_ended = False
        self._leaves_after = leaves_after
        self._left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])
            self.is_ended = not message.get("more_body")
        if len(self.pieces) == self._leaves_after:
            self._left.set()
        await asyncio.sleep(0)  # as the server, which waits for the socket
        await asyncio.sleep(0)


async def sent(client: Client, range_header: str | None = None) -> MemoryFiles:
    store = MemoryFiles(part_bytes=10)
    store.add("f", *TEN_PARTS)
    record = FileRecord(
        id="f", filename="f", purpose="batch", created_at=1, num_bytes=100, num_parts=10
    )
    response = ContentResponse(store, "t", record, range_header)
    await response.begin()
    await response({"type": "http", "method": "GET"}, client.receive, client.send)
    return store


async def test_a_whole_file_is_sent_part_by_part() -> None:
    client = Client(leaves_after=99)
    store = await sent(client)
    assert b"".join(client.pieces) == b"".join(TEN_PARTS)
    assert client.is_ended
    assert store.num_read == 10


async def test_behind_a_range_nothing_is_read() -> None:
    client = Client(leaves_after=99)
    store = await sent(client, "bytes=15-24")
    assert b"".join(client.pieces) == b"1" * 5 + b"2" * 5
    assert store.num_read == 3


async def test_for_a_client_that_has_left_nothing_more_is_read() -> None:
    store = await sent(Client(leaves_after=3))
    assert store.num_read < 6


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, None),
        ("", None),
        ("bytes=-", None),
        ("bytes=5-2", None),
        ("bytes=0-1,5-6", None),
        ("bytes=" + "9" * 30 + "-", None),
        ("bytes=0-0", (0, 1)),
        ("bytes=10-", (10, 100)),
        ("bytes=10-999", (10, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-999", (0, 100)),
        ("bytes=100-", (100, 100)),
        ("bytes=-0", (100, 100)),
    ],
)
def test_a_range_is_read_as_the_standard_says(
    header: str | None, found: tuple[int, int] | None
) -> None:
    assert range_of(header, 100) == found
