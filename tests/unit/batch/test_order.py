"""In which order the lines of a batch are run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from headrace.batch import order
from headrace.batch.errors import InputError
from headrace.batch.order import ordered, split
from headrace.shared.batch_lines import Parser


def raw(number: int, prompt: str) -> bytes:
    body = {"model": "m", "max_tokens": number, "messages": [{"role": "user", "content": prompt}]}
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


async def pieces(data: bytes, num_bytes: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), num_bytes):
        yield data[start : start + num_bytes]


async def numbers(data: bytes, num_bytes: int = 7) -> list[int]:
    return [item.number async for item in ordered(split(pieces(data, num_bytes)), Parser())]


DATA = b"".join(raw(n, f"{'ab'[n % 2]} long beginning {n}") for n in range(1, 9))


async def test_lines_that_begin_alike_follow_one_another() -> None:
    assert await numbers(DATA) == [2, 4, 6, 8, 1, 3, 5, 7]


async def test_however_the_input_comes_the_order_is_the_same() -> None:
    assert {tuple(await numbers(DATA, num)) for num in (1, 64, 10_000)} == {
        (2, 4, 6, 8, 1, 3, 5, 7)
    }


async def test_no_more_lines_are_held_than_are_looked_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "AHEAD_LINES", 4)
    assert await numbers(DATA) == [2, 4, 1, 3, 6, 8, 5, 7]
    monkeypatch.setattr(order, "AHEAD_BYTES", 1)
    assert await numbers(DATA) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_line_that_is_not_what_was_validated_ends_the_batch() -> None:
    with pytest.raises(InputError, match="line 9 of the input"):
        await numbers(DATA + b"no JSON\n")
