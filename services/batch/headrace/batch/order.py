"""In which order a batch's lines are run: those whose prompts begin alike follow one another.

So the engines find the common beginning in their prefix caches. The order depends on the input alone: a later owner
of the batch runs the lines in the same one, and so knows which of them an earlier owner may have under way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from headrace.batch.errors import InputError
from headrace.shared.batch_lines import Line, LineError, Parser, Request, Splitter

AHEAD_LINES = 2_000
AHEAD_BYTES = 16 * 2**20
KEY_BYTES = 2_048
NOTHING = msgspec.Raw(b"")


class _Beginning(msgspec.Struct):
    tools: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING


_beginnings = msgspec.json.Decoder(_Beginning)


@dataclass(frozen=True, slots=True)
class Item:
    """One line that is to be run."""

    number: int  #: of the line, from 1
    request: Request


async def split(data: AsyncIterator[bytes]) -> AsyncIterator[Line]:
    """Yield the lines of a file that comes in pieces."""
    splitter = Splitter()
    async for piece in data:
        for line in splitter.feed(piece):
            yield line
    for line in splitter.finish():
        yield line


async def ordered(lines: AsyncIterator[Line], parser: Parser) -> AsyncIterator[Item]:
    """Yield the requests of lines that were validated, with a bounded number of them in memory. Raises: InputError."""
    block: list[Item] = []
    num_bytes = 0
    async for line in lines:
        try:
            block.append(Item(line.number, parser.parse(line)))
        except LineError as error:
            raise InputError(
                f"line {line.number} of the input is not what was validated: {error}"
            ) from None
        num_bytes += len(line.raw)
        if len(block) >= AHEAD_LINES or num_bytes >= AHEAD_BYTES:
            for item in sorted(block, key=_key):
                yield item
            block, num_bytes = [], 0
    for item in sorted(block, key=_key):
        yield item


def _key(item: Item) -> tuple[str, bytes]:
    return item.request.model, beginning_of(item.request.body)


def beginning_of(body: bytes) -> bytes:
    """Return what the prompt of a request begins with, as far as it decides about the order."""
    found = _beginnings.decode(body)
    parts = (found.tools, found.instructions, found.messages, found.prompt, found.input)
    return b"\0".join(bytes(part)[:KEY_BYTES] for part in parts)
