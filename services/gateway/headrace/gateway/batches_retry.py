"""The input of a batch that tries the rest of another one: its lines that failed or expired, as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from headrace.shared.batches import CANCELLED_CODE, FileRecord
from headrace.shared.files import FileStore, FileWriter


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Line(msgspec.Struct):
    custom_id: str
    error: _Error | None = None


_line = msgspec.json.Decoder(_Line)


async def write_rest(
    store: FileStore, tenant: str, source: FileRecord, errors: FileRecord, file_id: str
) -> FileWriter:
    """Write the lines of `source` that stand in `errors` to a new file; those that were cancelled don't count.

    Raises: FileGoneError when one of the files was deleted meanwhile, BrokerError, QueueFullError.
    """
    wanted: set[str] = set()
    async for line in _lines(store, tenant, errors):
        result = _read(line)
        if result is not None and (result.error is None or result.error.code != CANCELLED_CODE):
            wanted.add(result.custom_id)
    async with FileWriter(store, tenant, file_id) as writer:
        async for line in _lines(store, tenant, source):
            request = _read(line)
            if request is not None and request.custom_id in wanted:
                await writer.write(line)
    return writer


def _read(line: bytes) -> _Line | None:
    """Return what is looked at of a line of either file. None: it is no line of such a file."""
    try:
        return _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def _lines(store: FileStore, tenant: str, record: FileRecord) -> AsyncIterator[bytes]:
    """Yield the lines of a file that are not empty, each with its line break."""
    rest = b""
    async for part in store.parts(tenant, record.id, num_parts=record.num_parts):
        *lines, rest = (rest + part.data).split(b"\n")
        for line in lines:
            if line.strip():
                yield line + b"\n"
    if rest.strip():
        yield rest + b"\n"
