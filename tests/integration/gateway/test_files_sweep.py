"""What nobody removes by a request is removed by the gateway's sweep, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headrace.gateway.batches import Batches
from headrace.gateway.batches_order import order_of
from headrace.gateway.files import Files
from headrace.gateway.files_sweep import Sweeper
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.shared import subjects
from headrace.shared.batches import BatchRecord, DraftRecord, FileRecord
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, PayloadTooLargeError
from headrace.shared.files import BrokerFiles
from headrace.shared.records import new_id
from headrace.shared.workers import WorkerTable

DAY_S = 86_400
MAX_BYTES = 3 * 2**20


@pytest_asyncio.fixture
async def files(own_broker: Broker) -> AsyncIterator[Files]:
    """On a broker of the test's own: a sweep goes through everything that there is."""
    async with WorkerTable(own_broker) as workers:
        link = Link()
        link.open(own_broker, workers)
        yield Files(link, max_bytes=MAX_BYTES, pace=Pace())


async def sweep(files: Files, broker: Broker, *, later_s: float = 0) -> None:
    link = files._link
    at = time.time() + later_s
    batches = Batches(link, files)
    await Sweeper(files, batches, pace=Pace(), clock=lambda: at).sweep()


async def away(self: BrokerFiles, tenant: str, file_id: str) -> None:
    """Stands for a deletion during which the broker is away."""
    raise BrokerError("away")


async def parts(broker: Broker) -> list[str]:
    """The files of which there is a part."""
    names = await broker.documents.names(subjects.file_parts_all())
    return sorted(name.split(".")[4] for name in names)


async def put(files: Files, tenant: str, **fields: object) -> FileRecord:
    file_id = new_id("file-")
    record = FileRecord(id=file_id, filename="f", purpose="batch", created_at=int(time.time()))
    record = msgspec.structs.replace(record, **fields)
    await files.records.put("file", tenant, file_id, record, expect=0)
    await files.store.append_part(tenant, file_id, 0, b"part")
    return record


def batch_of(record: FileRecord) -> BatchRecord:
    return BatchRecord(
        id=new_id("batch_"),
        endpoint="/v1/completions",
        input_file_id=record.id,
        completion_window="1d",
        created_at=record.created_at,
        expires_at=record.created_at + DAY_S,
    )


async def test_a_file_past_its_time_is_deleted_and_others_stay(
    files: Files, own_broker: Broker, tenant: str
) -> None:
    soon = await put(files, tenant, expires_at=1)
    later = await put(files, tenant, expires_at=2**40)
    kept = await put(files, tenant)
    await sweep(files, own_broker, later_s=9 * DAY_S)
    assert await parts(own_broker) == sorted([later.id, kept.id])
    assert await files.records.get("file", tenant, soon.id, FileRecord) is None
    assert await files.records.get("file", tenant, kept.id, FileRecord) is not None


async def test_a_file_past_its_time_stays_while_a_batch_reads_it(
    files: Files, own_broker: Broker, tenant: str
) -> None:
    record = await put(files, tenant)
    batch = batch_of(record)
    await files.use(tenant, record.id, batch.id)
    revision = await files.records.put("batch", tenant, batch.id, batch, expect=0)
    found = await files.records.get("file", tenant, record.id, FileRecord)
    assert found is not None
    past = msgspec.structs.replace(found[0], expires_at=1)
    await files.records.put("file", tenant, record.id, past, expect=found[1])
    await sweep(files, own_broker)
    assert await parts(own_broker) == [record.id]
    over = msgspec.structs.replace(batch, status="completed")
    await files.records.put("batch", tenant, batch.id, over, expect=revision)
    await sweep(files, own_broker)
    assert await parts(own_broker) == []


async def test_what_an_upload_left_that_broke_off_goes_once_it_can_not_go_on(
    files: Files, own_broker: Broker, tenant: str
) -> None:
    gone, kept = new_id("file-"), await put(files, tenant)
    await files.store.append_part(tenant, gone, 0, b"part")
    draft = DraftRecord(since=int(time.time()))
    for file_id in (gone, kept.id):  # the gateway of the second one died behind the record
        await files.records.put("draft", tenant, file_id, draft, expect=0)
    await sweep(files, own_broker)
    assert await parts(own_broker) == sorted([gone, kept.id])
    await sweep(files, own_broker, later_s=2 * Pace().upload_timeout_s + 1)
    assert await parts(own_broker) == [kept.id]
    assert (await files.records.list("draft", tenant, DraftRecord)).records == []


async def test_a_sweep_leaves_what_it_has_no_note_of(
    files: Files, own_broker: Broker, tenant: str
) -> None:
    await files.store.append_part(tenant, "f", 0, b"part")
    await sweep(files, own_broker, later_s=9 * DAY_S)
    assert await parts(own_broker) == ["f"]


async def test_a_file_whose_deletion_broke_off_leaves_nothing_in_the_end(
    files: Files, own_broker: Broker, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await put(files, tenant)

    with monkeypatch.context() as patch:
        patch.setattr(BrokerFiles, "delete", away)
        with pytest.raises(BrokerError):
            await files.delete(tenant, record.id)
    assert await parts(own_broker) == [record.id]
    await sweep(files, own_broker, later_s=2 * Pace().upload_timeout_s + 1)
    assert await parts(own_broker) == []


async def test_an_upload_whose_rest_could_not_be_removed_leaves_nothing_in_the_end(
    files: Files, own_broker: Broker, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        yield bytes(MAX_BYTES)
        yield b"and one piece more"

    with monkeypatch.context() as patch:
        patch.setattr(BrokerFiles, "delete", away)
        with pytest.raises(PayloadTooLargeError):
            await files.upload(
                tenant, chunks(), {"content-type": "multipart/form-data; boundary=b"}
            )
    assert len(await parts(own_broker)) > 0
    await sweep(files, own_broker, later_s=2 * Pace().upload_timeout_s + 1)
    assert await parts(own_broker) == []


async def test_a_batch_whose_gateway_died_before_it_was_enqueued_is_enqueued(
    files: Files, own_broker: Broker, tenant: str
) -> None:
    record = await put(files, tenant)
    waits, over = batch_of(record), batch_of(record)
    over = msgspec.structs.replace(over, status="completed")
    for batch in (waits, over):
        await files.records.put("batch", tenant, batch.id, batch, expect=0)
    for _ in range(2):
        await sweep(files, own_broker)
    queued = await own_broker.stored_on(subjects.batch_filter())
    assert [received.subject for received in queued] == [subjects.batch(tenant, waits.id)]


async def test_a_batch_that_a_worker_has_is_made_though_its_publish_ack_was_lost(
    files: Files, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await put(files, tenant)
    batches = Batches(files._link, files)

    async def taken(tenant: str, batch_id: str) -> None:
        found = await files.records.get("batch", tenant, batch_id, BatchRecord)
        assert found is not None
        running = msgspec.structs.replace(found[0], status="in_progress")
        await files.records.put("batch", tenant, batch_id, running, expect=found[1])
        raise BrokerError("no publish ack")

    monkeypatch.setattr(batches, "enqueue", taken)
    order = order_of(
        {
            "input_file_id": record.id,
            "endpoint": "/v1/completions",
            "completion_window": "1h",
        }
    )
    batch = await batches.create(tenant, order)
    assert (await batches.get(tenant, batch.id)).status == "in_progress"
