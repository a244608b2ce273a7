"""`/v1/batches` through OpenAI's own client; the batch service is played by the test."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from headrace.shared import subjects
from headrace.shared.batches import (
    CANCELLED_CODE,
    EXPIRED_CODE,
    BatchCounts,
    BatchError,
    BatchRecord,
    BatchUsage,
    FileRecord,
)
from headrace.shared.broker import Broker, WorkQueue
from headrace.shared.broker.jetstream import api
from headrace.shared.files import BrokerFiles, FileWriter
from headrace.shared.records import Records, new_id

Client = openai.AsyncOpenAI
Clients = tuple[Client, Client]
CHAT = "/v1/chat/completions"


@pytest.fixture
def records(broker: Broker) -> Records:
    return Records(broker)


def line(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT}).encode() + b"\n"


async def upload(sdk: Client, content: bytes = line("a"), purpose: Any = "batch") -> str:
    return (await sdk.files.create(file=("in.jsonl", content), purpose=purpose)).id


async def create(sdk: Client, file_id: str, **options: Any) -> Any:
    options = {"endpoint": CHAT, "completion_window": "24h", **options}
    return await sdk.batches.create(input_file_id=file_id, **options)


async def enqueued(broker: Broker, tenant: str, batch_id: str) -> bool:
    return bool(await broker.stored_on(subjects.batch(tenant, batch_id)))


async def change(records: Records, tenant: str, batch_id: str, **fields: Any) -> BatchRecord:
    """Change a batch as its owner does."""
    found = await records.get("batch", tenant, batch_id, BatchRecord)
    assert found is not None
    changed = msgspec.structs.replace(found[0], **fields)
    await records.put("batch", tenant, batch_id, changed, expect=found[1])
    return changed


async def test_a_batch_is_recorded_and_waits_for_a_worker(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    file_id = await upload(sdk)
    batch = await create(sdk, file_id, metadata={"job": "nightly"})
    assert batch.id.startswith("batch_")
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    assert (batch.input_file_id, batch.metadata) == (file_id, {"job": "nightly"})
    assert (batch.completion_window, batch.expires_at) == ("24h", batch.created_at + 86_400)
    assert batch.request_counts.total == 0
    assert (batch.errors, batch.usage, batch.output_file_id) == (None, None, None)
    assert await sdk.batches.retrieve(batch.id) == batch
    assert [found async for found in sdk.batches.list()] == [batch]
    assert await enqueued(broker, tenant, batch.id)


async def test_a_batch_with_a_mistake_is_refused_and_the_field_named(sdk: Client) -> None:
    file_id = await upload(sdk)
    with pytest.raises(openai.BadRequestError) as refused:
        await create(sdk, file_id, completion_window="soon")
    assert refused.value.param == "completion_window"
    assert (await sdk.batches.list()).data == []
    assert (await sdk.files.delete(file_id)).deleted


async def test_the_input_must_be_a_file_of_the_tenant_for_batches(
    two_tenants: Clients, broker: Broker
) -> None:
    mine, theirs = two_tenants
    for file_id in (await upload(mine), "file-nobody-has-it", "*"):
        with pytest.raises(openai.NotFoundError) as missing:
            await create(theirs, file_id)
        assert missing.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError, match="needs the purpose 'batch'") as wrong:
        await create(theirs, await upload(theirs, purpose="user_data"))
    assert wrong.value.param == "input_file_id"


async def test_one_tenants_batch_is_not_there_for_another(two_tenants: Clients) -> None:
    mine, theirs = two_tenants
    batch = await create(mine, await upload(mine))
    for call in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError, match=f"No batch found with id '{batch.id}'"):
            await call(batch.id)
    assert (await theirs.batches.list()).data == []
    for unknown in ("batch_1", "*", "a.b"):
        with pytest.raises(openai.NotFoundError):
            await mine.batches.retrieve(unknown)


async def test_batches_are_listed_page_by_page_the_newest_first(sdk: Client) -> None:
    file_id = await upload(sdk)
    ids = sorted([(await create(sdk, file_id)).id for _ in range(5)], reverse=True)
    page = await sdk.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:2]
    assert [batch.id async for batch in sdk.batches.list(limit=2)] == ids
    for limit in (0, 101):
        with pytest.raises(openai.BadRequestError):
            await sdk.batches.list(limit=limit)


async def test_what_its_owner_notes_is_seen(sdk: Client, records: Records, tenant: str) -> None:
    batch = await create(sdk, await upload(sdk))
    await change(
        records,
        tenant,
        batch.id,
        status="failed",
        failed_at=7,
        model="m",
        counts=BatchCounts(total=3, completed=1, failed=2),
        usage=BatchUsage(input_tokens=5, cached_tokens=2, output_tokens=7, reasoning_tokens=1),
        errors=(BatchError(code="invalid_json", message="no JSON", line=2),),
        output_file_id="file-1",
    )
    seen = await sdk.batches.retrieve(batch.id)
    assert (seen.status, seen.failed_at, seen.model, seen.output_file_id) == (
        "failed",
        7,
        "m",
        "file-1",
    )
    assert seen.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert seen.usage.total_tokens == 12
    assert seen.usage.input_tokens_details.cached_tokens == 2
    assert seen.usage.output_tokens_details.reasoning_tokens == 1
    (error,) = seen.errors.data
    assert (error.code, error.message, error.line) == ("invalid_json", "no JSON", 2)


async def test_a_cancel_is_noted_once_and_refused_when_all_is_over(
    sdk: Client, records: Records, tenant: str
) -> None:
    batch = await create(sdk, await upload(sdk))
    first = await sdk.batches.cancel(batch.id)
    assert first.status == "cancelling"
    assert first.cancelling_at is not None
    assert await sdk.batches.cancel(batch.id) == first
    await change(records, tenant, batch.id, status="cancelled", cancelled_at=9)
    with pytest.raises(openai.ConflictError, match="is cancelled: it can't be cancelled") as late:
        await sdk.batches.cancel(batch.id)
    assert late.value.response.headers["x-should-retry"] == "false"


async def test_a_cancel_and_its_owners_changes_do_not_hide_each_other(
    sdk: Client, records: Records, tenant: str
) -> None:
    batch = await create(sdk, await upload(sdk))
    for number in range(20):
        ends = await asyncio.gather(
            change(records, tenant, batch.id, status="in_progress", epoch=number),
            sdk.batches.cancel(batch.id),
            return_exceptions=True,
        )
        found = await records.get("batch", tenant, batch.id, BatchRecord)
        assert found is not None
        if not isinstance(ends[0], BaseException):
            assert found[0].epoch == number
        # Who wrote second has read what the first wrote, or has begun anew.
        assert found[0].status == "cancelling" or isinstance(ends[0], BatchRecord)


async def test_the_input_of_a_batch_that_is_not_over_can_not_be_deleted(
    sdk: Client, records: Records, tenant: str
) -> None:
    file_id = await upload(sdk)
    first, second = await create(sdk, file_id), await create(sdk, file_id)
    await change(records, tenant, first.id, status="completed")
    with pytest.raises(openai.ConflictError, match=f"is the input of {second.id}"):
        await sdk.files.delete(file_id)
    await change(records, tenant, second.id, status="completed")
    assert (await sdk.files.delete(file_id)).deleted


async def write(broker: Broker, tenant: str, content: bytes) -> str:
    """Write an output of a batch, as its owner does."""
    file_id = new_id("file-")
    async with FileWriter(BrokerFiles(broker), tenant, file_id) as writer:
        await writer.write(content)
    record = FileRecord(
        id=file_id,
        filename="out.jsonl",
        purpose="batch_output",
        created_at=1,
        num_bytes=writer.num_bytes,
        num_parts=writer.num_parts,
    )
    await Records(broker).put("file", tenant, file_id, record, expect=0)
    return file_id


def failed(custom_id: str, code: str | None) -> bytes:
    error = {"code": code, "message": "no"} if code else None
    return json.dumps({"id": "r", "custom_id": custom_id, "error": error}).encode() + b"\n"


async def retry(sdk: Client, batch_id: str, **changed: Any) -> Any:
    return await sdk.post(f"/batches/{batch_id}/retry", body=changed, cast_to=httpx.Response)


async def test_a_retry_is_a_batch_of_the_lines_that_failed_or_expired(
    sdk: Client, broker: Broker, records: Records, tenant: str
) -> None:
    names = ["answered", "failed", "expired", "cancelled", "refused"]
    file_id = await upload(sdk, b"\n".join(line(name) for name in names).rstrip())
    batch = await create(sdk, file_id, completion_window="1h", metadata={"k": "v"})
    error_file_id = await write(
        broker,
        tenant,
        failed("failed", "engine_error")
        + failed("expired", EXPIRED_CODE)
        + failed("cancelled", CANCELLED_CODE)
        + failed("refused", None),
    )
    with pytest.raises(openai.ConflictError, match="is validating: wait for its end"):
        await retry(sdk, batch.id)
    await change(records, tenant, batch.id, status="cancelled", error_file_id=error_file_id)
    again = (await retry(sdk, batch.id)).json()
    assert (again["status"], again["retry_of"]) == ("validating", batch.id)
    assert (again["completion_window"], again["metadata"]) == ("1h", {"k": "v"})
    content = (await sdk.files.content(again["input_file_id"])).content
    assert content == line("failed") + line("expired") + line("refused")
    assert await enqueued(broker, tenant, again["id"])
    shorter = (await retry(sdk, batch.id, completion_window="5m")).json()
    assert shorter["completion_window"] == "5m"
    num_files = len((await sdk.files.list()).data)
    with pytest.raises(openai.BadRequestError):
        await retry(sdk, batch.id, completion_window="never")
    assert len((await sdk.files.list()).data) == num_files


async def test_a_batch_without_failures_has_nothing_to_retry(
    sdk: Client, broker: Broker, records: Records, tenant: str
) -> None:
    batch = await create(sdk, await upload(sdk))
    await change(records, tenant, batch.id, status="completed")
    with pytest.raises(openai.ConflictError, match="no line that failed or expired"):
        await retry(sdk, batch.id)
    error_file_id = await write(broker, tenant, failed("a", CANCELLED_CODE))
    await change(records, tenant, batch.id, error_file_id=error_file_id)
    with pytest.raises(openai.ConflictError, match="no line that failed or expired"):
        await retry(sdk, batch.id)
    with pytest.raises(openai.NotFoundError):
        await retry(sdk, "batch_1")
    assert len((await sdk.files.list()).data) == 2  # the input, and the errors


async def test_a_worker_takes_a_batch_from_its_queue(
    sdk: Client, broker: Broker, tenant: str
) -> None:
    batch = await create(sdk, await upload(sdk))
    queue = WorkQueue.batch()
    await broker.declare_queue(queue)
    mine = subjects.batch(tenant, batch.id)
    async with asyncio.timeout(60):
        while True:
            delivery = await broker.take(queue, wait_s=5)
            assert delivery is not None
            if delivery.subject == mine:
                break
            await delivery.ack()  # another test's
    assert len(await broker.stored_on(mine)) == 1
    await delivery.ack()
    assert await broker.stored_on(mine) == []


async def test_a_batch_that_nobody_can_be_told_of_is_not_made(
    own_broker: Broker, own_sdk: Client
) -> None:
    file_id = await upload(own_sdk)
    await api(own_broker._control, "STREAM.DELETE.HR_BATCH")
    with pytest.raises(openai.APIStatusError) as refused:
        await create(own_sdk, file_id)
    assert refused.value.status_code == 503
    assert (await own_sdk.batches.list()).data == []
    assert (await own_sdk.files.delete(file_id)).deleted


async def test_the_same_call_with_its_key_is_the_same_batch(
    two_tenants: Clients, broker: Broker, tenant: str
) -> None:
    sdk, other = two_tenants
    file_id = await upload(sdk)
    headers = {"Idempotency-Key": new_id("")}
    made = await asyncio.gather(
        *(create(sdk, file_id, extra_headers=headers) for _ in range(4)), return_exceptions=True
    )
    batches = [batch for batch in made if not isinstance(batch, BaseException)]
    assert all(isinstance(e, openai.ConflictError) for e in made if isinstance(e, BaseException))
    again = await create(sdk, file_id, extra_headers=headers)
    assert {batch.id for batch in batches} == {again.id}
    assert len((await sdk.batches.list()).data) == 1
    assert await enqueued(broker, tenant, again.id)
    with pytest.raises(openai.UnprocessableEntityError):
        await create(sdk, file_id, completion_window="1h", extra_headers=headers)
    theirs = await upload(other)
    assert (await create(other, theirs, extra_headers=headers)).id != again.id


async def test_a_batch_that_was_not_made_frees_its_key(sdk: Client) -> None:
    headers = {"Idempotency-Key": new_id("")}
    with pytest.raises(openai.APIStatusError):
        await create(sdk, "file-nothing", extra_headers=headers)
    assert await create(sdk, await upload(sdk), extra_headers=headers)
