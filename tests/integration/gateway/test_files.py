"""`/v1/files` through OpenAI's own client, and what no client of theirs would send."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import openai
import pytest

from headrace.shared.batches import DraftRecord, FileRecord
from headrace.shared.broker import Broker
from headrace.shared.files import BrokerFiles
from headrace.shared.nats_server import NatsServer
from headrace.shared.records import Records, new_id

Client = openai.AsyncOpenAI
Clients = tuple[Client, Client]

MIB = 2**20
LINES = b"".join(b'{"custom_id": "%d"}\n' % number for number in range(100_000))


@pytest.fixture
def files(broker: Broker) -> BrokerFiles:
    return BrokerFiles(broker)


async def upload(sdk: Client, content: bytes = b"{}\n", **options: Any) -> Any:
    options = {"purpose": "batch", **options}
    return await sdk.files.create(file=("in.jsonl", content), **options)


async def parts_left(broker: Broker, tenant: str) -> set[str]:
    """The files of which there is a part, or a note that there may be."""
    parts = await broker.documents.names(f"hr.v1.file.{tenant}.*.*")
    notes = await Records(broker).list("draft", tenant, DraftRecord)
    return {name.split(".")[4] for name in parts} | {note.record_id for note in notes.records}


async def test_a_file_is_uploaded_read_listed_and_deleted(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    file = await upload(sdk, LINES)
    assert file.id.startswith("file-")
    assert (file.object, file.bytes, file.filename) == ("file", len(LINES), "in.jsonl")
    assert (file.purpose, file.status) == ("batch", "processed")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert await sdk.files.retrieve(file.id) == file
    content = await sdk.files.content(file.id)
    assert content.content == LINES
    assert content.response.headers["content-length"] == str(len(LINES))
    assert [found async for found in sdk.files.list()] == [file]
    deleted = await sdk.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    assert [found async for found in sdk.files.list()] == []
    assert await parts_left(broker, tenant) == set()
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"No such File object: {file.id}"):
            await call(file.id)


async def test_one_tenants_file_is_not_there_for_another(two_tenants: Clients) -> None:
    mine, theirs = two_tenants
    file = await upload(mine)
    for call in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)
    assert [found async for found in theirs.files.list()] == []
    assert (await mine.files.content(file.id)).content == b"{}\n"


async def test_an_id_that_nobody_has_is_not_found(sdk: Client) -> None:
    for file_id in ("file-1", "*", ">", "a.b", "x" * 500, "%2e%2e"):
        for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file_id)


async def test_a_list_goes_page_by_page_in_either_order_and_by_purpose(sdk: Client) -> None:
    names = []
    for number in range(5):
        purpose = "user_data" if number == 2 else "batch"
        names.append((await upload(sdk, purpose=purpose)).id)
    names.sort()  # two of one millisecond stand in either order
    page = await sdk.files.list(limit=2)
    assert [file.id for file in page.data] == names[:2:-1]
    assert page.has_more
    assert [file.id async for file in sdk.files.list(limit=2)] == names[::-1]
    assert [file.id async for file in sdk.files.list(limit=2, order="asc")] == names
    found = await sdk.files.list(purpose="user_data")
    assert len(found.data) == 1
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            await sdk.files.list(**wrong)  # type: ignore[arg-type]


async def test_a_range_of_a_file_is_read(sdk: Client) -> None:
    file = await upload(sdk, LINES)
    whole = len(LINES)
    for wanted, start, end in (
        ("bytes=0-9", 0, 10),
        ("bytes=1048570-1048590", 1_048_570, 1_048_591),
        ("bytes=2000000-", 2_000_000, whole),
        ("bytes=-5", whole - 5, whole),
    ):
        found = await sdk.files.content(file.id, extra_headers={"Range": wanted})
        assert found.response.status_code == 206
        assert found.content == LINES[start:end]
        assert found.response.headers["content-range"] == f"bytes {start}-{end - 1}/{whole}"
    for odd in ("bytes=a-b", "bytes=-", "bytes=9-1", "bytes=0-1,3-4", "lines=1-2"):
        found = await sdk.files.content(file.id, extra_headers={"Range": odd})
        assert (found.response.status_code, found.content) == (200, LINES)
    with pytest.raises(openai.APIStatusError) as beyond:
        await sdk.files.content(file.id, extra_headers={"Range": f"bytes={whole}-"})
    assert beyond.value.status_code == 416


async def test_an_upload_with_a_mistake_is_refused_and_leaves_nothing(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"content": b""}, "file"),
        ({"expires_after": {"anchor": "last_use", "seconds": 3_600}}, "expires_after.anchor"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
    ]
    for options, param in mistakes:
        with pytest.raises(openai.BadRequestError) as refused:
            await upload(sdk, **{"content": LINES, **options})
        assert refused.value.param == param
    assert await parts_left(broker, tenant) == set()
    assert (await sdk.files.list()).data == []


async def test_an_upload_may_say_when_it_expires(sdk: Client) -> None:
    file = await upload(sdk, expires_after={"anchor": "created_at", "seconds": 3_600})
    assert file.expires_at == file.created_at + 3_600
    kept = await upload(sdk, purpose="user_data")
    assert kept.expires_at is None


async def test_a_file_that_is_too_large_is_refused_with_the_setting(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    limit = 3 * MIB
    assert (await upload(sdk, b"x" * limit)).bytes == limit
    with pytest.raises(openai.APIStatusError, match=r"gateway\.max_file_bytes") as refused:
        await upload(sdk, b"x" * (limit + 1))
    assert refused.value.status_code == 413
    assert len(await parts_left(broker, tenant)) == 1


async def body(chunks: list[bytes], gone: asyncio.Event | None = None) -> Any:
    for chunk in chunks:
        yield chunk
    if gone is not None:
        gone.set()
        await asyncio.Event().wait()


def form(*pieces: bytes, end: bytes = b"--b--\r\n") -> list[bytes]:
    return [*pieces, end]


PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


async def post(
    sdk: Client, chunks: list[bytes], kind: str = "multipart/form-data; boundary=b"
) -> Any:
    """Upload without a Content-Length."""
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(
            f"{sdk.base_url}files",
            content=body(chunks),
            headers={"Authorization": f"Bearer {sdk.api_key}", "Content-Type": kind},
        )


async def test_an_upload_without_a_length_is_taken_and_held_to_the_limit(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    taken = await post(sdk, form(FILE_HEAD, LINES, b"\r\n", PURPOSE))
    assert (taken.status_code, taken.json()["bytes"]) == (200, len(LINES))
    refused = await post(sdk, form(PURPOSE, FILE_HEAD, *[bytes(MIB)] * 4, b"\r\n"))
    assert refused.status_code == 413
    assert await parts_left(broker, tenant) == {taken.json()["id"]}


async def test_a_form_that_is_none_is_refused_and_leaves_nothing(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    whole = (FILE_HEAD, b"x\r\n")
    plain = FILE_HEAD.replace(b'; filename="f"', b"")
    many_fields = [PURPOSE.replace(b"purpose", b"%d" % number) for number in range(50)]
    mistakes = [
        (form(PURPOSE, FILE_HEAD, LINES, end=b""), "ends before its last boundary"),
        (form(b"no form at all"), "can't be read"),
        (form(PURPOSE), "'file' is a required property"),
        (form(PURPOSE, *whole, *whole), "must have one file"),
        (form(PURPOSE, FILE_HEAD.replace(b' name="file";', b""), b"x\r\n"), "has no name"),
        (form(*whole, plain.replace(b"file", b"f"), b"x" * 5_000, b"\r\n"), "4,096 bytes"),
        (form(PURPOSE, *whole, *many_fields), "more than 32 fields"),
        (form(PURPOSE, *whole, *[PURPOSE] * 2_000), "65,536 bytes beside its file"),
    ]
    for chunks, told in mistakes:
        refused = await post(sdk, chunks)
        assert refused.status_code == 400
        assert told in refused.json()["error"]["message"]
    for kind in ("multipart/form-data", "multipart/form-data; boundary=", "application/json"):
        refused = await post(sdk, form(PURPOSE, FILE_HEAD, b"x\r\n"), kind)
        assert refused.status_code == 400
    assert await parts_left(broker, tenant) == set()


async def test_a_client_that_leaves_half_way_leaves_nothing(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    gone = asyncio.Event()
    async with httpx.AsyncClient(timeout=30) as client:
        uploading = asyncio.create_task(
            client.post(
                f"{sdk.base_url}files",
                content=body([PURPOSE, FILE_HEAD, LINES[: 2 * MIB]], gone),
                headers={
                    "Authorization": f"Bearer {sdk.api_key}",
                    "Content-Type": "multipart/form-data; boundary=b",
                },
            )
        )
        async with asyncio.timeout(60):
            await gone.wait()
            while not await parts_left(broker, tenant):
                continue
            uploading.cancel()
            await asyncio.gather(uploading, return_exceptions=True)
            while await parts_left(broker, tenant):
                continue
    assert (await sdk.files.list()).data == []


async def test_the_output_of_a_batch_that_runs_is_readable_and_not_deletable(
    sdk: Client, broker: Broker, files: BrokerFiles, tenant: str
) -> None:
    live = FileRecord(
        id=new_id("file-"), filename="out", purpose="batch_output", created_at=1, state="live"
    )
    await Records(broker).put("file", tenant, live.id, live, expect=0)
    assert (await sdk.files.content(live.id)).content == b""
    for number in range(3):
        await files.append_part(tenant, live.id, number, b"line %d\n" % number)
        found = await sdk.files.content(live.id)
        assert found.content.splitlines()[-1] == b"line %d" % number
    assert (await sdk.files.retrieve(live.id)).status == "uploaded"
    with pytest.raises(openai.ConflictError, match="still written"):
        await sdk.files.delete(live.id)


async def test_a_content_that_breaks_off_is_no_shorter_file(
    sdk: Client, broker: Broker, files: BrokerFiles, tenant: str
) -> None:
    record = FileRecord(
        id=new_id("file-"),
        filename="f",
        purpose="batch",
        created_at=1,
        num_bytes=30,
        num_parts=3,
    )
    await Records(broker).put("file", tenant, record.id, record, expect=0)
    with pytest.raises(openai.NotFoundError, match="part 0 is not there"):
        await sdk.files.content(record.id)
    await files.append_part(tenant, record.id, 0, b"0123456789")
    with pytest.raises(openai.APIConnectionError):
        await sdk.files.content(record.id)
    live = msgspec.structs.replace(record, id=new_id("file-"), state="live")
    await Records(broker).put("file", tenant, live.id, live, expect=0)
    for number in (0, 2):
        await files.append_part(tenant, live.id, number, b"0123456789")
    with pytest.raises(openai.APIConnectionError):
        await sdk.files.content(live.id)


async def test_a_file_past_its_time_is_not_found(sdk: Client, broker: Broker, tenant: str) -> None:
    record = FileRecord(
        id=new_id("file-"),
        filename="f",
        purpose="batch",
        created_at=1,
        expires_at=int(time.time()) - 1,
    )
    await Records(broker).put("file", tenant, record.id, record, expect=0)
    with pytest.raises(openai.NotFoundError):
        await sdk.files.retrieve(record.id)
    assert (await sdk.files.list()).data == []


async def test_without_a_broker_files_are_unavailable(
    own_server: NatsServer, own_sdk: Client
) -> None:
    own_server.kill()
    calls = (
        upload(own_sdk),
        own_sdk.files.retrieve("file-1"),
        own_sdk.batches.retrieve("batch_1"),
    )
    for call in calls:
        with pytest.raises(openai.APIStatusError) as refused:
            await call
        assert refused.value.status_code == 503
        assert "retry-after" in refused.value.response.headers
