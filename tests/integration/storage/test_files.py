"""File contents on a real broker, and in a store that speaks S3: written once, read part by part, deleted whole."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import pytest

from headrace.shared.broker import Broker
from headrace.shared.errors import (
    BrokerError,
    ConflictError,
    FileGoneError,
    MalformedMessageError,
    SettingsError,
)
from headrace.shared.file_store import store_of
from headrace.shared.files import BrokerFiles, FileStore, FileWriter, Part
from headrace.shared.files_s3 import S3Files
from headrace.shared.settings import FilesSettings

MIB = 2**20


@pytest.fixture(params=["broker", "s3"])
def files(request: pytest.FixtureRequest) -> FileStore:
    if request.param == "broker":
        broker: Broker = request.getfixturevalue("broker")
        return BrokerFiles(broker)
    settings: FilesSettings = request.getfixturevalue("s3_settings")
    return S3Files(settings)


async def read(files: FileStore, tenant: str, **options: int) -> list[Part]:
    return [part async for part in files.parts(tenant, "f", **options)]


async def write(files: FileStore, tenant: str, *pieces: bytes) -> FileWriter:
    async with FileWriter(files, tenant, "f") as writer:
        for piece in pieces:
            await writer.write(piece)
    return writer


async def test_what_is_written_is_read_part_by_part(files: FileStore, tenant: str) -> None:
    content = b"".join(b"%07d" % number + b"x" * 193 + b"\n" for number in range(100_000))
    writer = await write(
        files, tenant, *(content[i : i + 65_536] for i in range(0, len(content), 65_536))
    )
    parts = await read(files, tenant, num_parts=writer.num_parts)
    assert b"".join(part.data for part in parts) == content
    assert (writer.num_bytes, writer.num_parts) == (len(content), len(parts))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert max(len(part.data) for part in parts) <= files.part_bytes
    assert all(part.data.endswith(b"\n") for part in parts)
    later = await read(files, tenant, start=3)
    assert [part.number for part in later] == list(range(3, len(parts)))
    assert await read(files, tenant, start=len(parts)) == []


async def test_a_line_longer_than_a_part_is_cut(files: FileStore, tenant: str) -> None:
    content = b"a\n" + b"x" * (2 * MIB + 5) + b"\nend"
    await write(files, tenant, content)
    assert b"".join(part.data for part in await read(files, tenant)) == content


async def test_a_file_of_nothing_has_no_parts(files: FileStore, tenant: str) -> None:
    assert (await write(files, tenant)).num_parts == 0
    assert await read(files, tenant, num_parts=0) == []


async def test_of_two_who_append_the_same_part_one_is_told_no(
    files: FileStore, tenant: str
) -> None:
    await files.append_part(tenant, "f", 0, b"first", {"Hr-Lines": "1"})
    with pytest.raises(ConflictError, match="somebody else writes it"):
        await files.append_part(tenant, "f", 0, b"second")
    (part,) = await read(files, tenant)
    assert (part.data, part.headers["Hr-Lines"]) == (b"first", "1")


async def test_a_writer_that_fails_leaves_nothing(files: FileStore, tenant: str) -> None:
    writer = FileWriter(files, tenant, "f")

    async def write() -> None:
        async with writer:
            await writer.write(b"x" * (files.part_bytes + 1))
            raise RuntimeError("the client is gone")

    with pytest.raises(RuntimeError, match="the client is gone"):
        await write()
    assert writer.num_parts > 0
    assert await read(files, tenant) == []


async def test_a_file_that_is_deleted_while_it_is_read_is_an_error_and_no_short_file(
    files: FileStore, tenant: str
) -> None:
    for number in range(20):
        await files.append_part(tenant, "f", number, b"part")
    reading = files.parts(tenant, "f", num_parts=20)
    assert (await anext(reading)).number == 0
    await files.delete(tenant, "f")
    with pytest.raises(FileGoneError, match="is not there"):
        async for _ in reading:
            pass
    assert await read(files, tenant) == []
    with pytest.raises(FileGoneError):
        await read(files, tenant, start=3, num_parts=20)


async def test_deleting_a_file_touches_no_other(files: FileStore, tenant: str) -> None:
    async with asyncio.TaskGroup() as group:
        for whose, file_id in ((tenant, "f"), (tenant, "f2"), (f"{tenant}-2", "f")):
            group.create_task(files.append_part(whose, file_id, 0, b"part"))
    await files.delete(tenant, "f")
    assert await read(files, tenant) == []
    for bad in ("*", ">", "f.*"):
        with pytest.raises(MalformedMessageError):
            await files.delete(tenant, bad)
    for whose, file_id in ((tenant, "f2"), (f"{tenant}-2", "f")):
        assert [part.data async for part in files.parts(whose, file_id)] == [b"part"]


async def test_a_bucket_that_is_not_there_is_an_error(
    s3_settings: FilesSettings, tenant: str
) -> None:
    files = S3Files(msgspec.structs.replace(s3_settings, s3_bucket="nobody-has-it"))
    for call in (files.append_part(tenant, "f", 0, b"x"), files.delete(tenant, "f")):
        with pytest.raises(BrokerError, match="bucket nobody-has-it: "):
            await call


async def test_two_stacks_share_a_bucket_by_their_prefixes(
    s3_settings: FilesSettings, tenant: str
) -> None:
    stacks = [
        S3Files(msgspec.structs.replace(s3_settings, s3_prefix=f"{s3_settings.s3_prefix}/{name}"))
        for name in ("a", "a2")
    ]
    for files in stacks:
        await files.append_part(tenant, "f", 0, b"part")
    await stacks[0].delete(tenant, "f")
    assert [len(await read(files, tenant)) for files in stacks] == [0, 1]


def test_the_store_is_chosen_by_the_settings(s3_settings: FilesSettings, broker: Broker) -> None:
    assert isinstance(store_of(FilesSettings())(broker), BrokerFiles)
    assert isinstance(store_of(s3_settings)(broker), S3Files)


def test_a_bucket_without_the_package_for_it_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "headrace.shared.files_s3")
    with pytest.raises(SettingsError, match=r"pip install \"headrace\[s3\]\""):
        store_of(FilesSettings(s3_bucket="files"))
