"""Records on a real broker: compare-and-set, lists, deletion, expiry."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.shared.broker import Broker
from headrace.shared.errors import ConflictError, MalformedMessageError, PayloadTooLargeError
from headrace.shared.records import MAX_RECORD_BYTES, Records, new_id

TIMEOUT_S = 30.0


class Note(msgspec.Struct, frozen=True):
    """A record of these tests."""

    text: str


@pytest.fixture
def records(broker: Broker) -> Records:
    return Records(broker)


async def test_of_two_who_write_a_new_record_one_is_told_no(records: Records, tenant: str) -> None:
    first = await records.put("batch", tenant, "a", Note("first"), expect=0)
    with pytest.raises(ConflictError):
        await records.put("batch", tenant, "a", Note("second"), expect=0)
    assert await records.get("batch", tenant, "a", Note) == (Note("first"), first)


async def test_a_change_of_what_was_read_before_another_change_is_refused(
    records: Records, tenant: str
) -> None:
    first = await records.put("batch", tenant, "a", Note("1"), expect=0)
    second = await records.put("batch", tenant, "a", Note("2"), expect=first)
    with pytest.raises(ConflictError):
        await records.put("batch", tenant, "a", Note("3"), expect=first)
    with pytest.raises(ConflictError):
        await records.delete("batch", tenant, "a", expect=first)
    assert await records.get("batch", tenant, "a", Note) == (Note("2"), second)


async def test_without_an_expectation_the_last_one_wins(records: Records, tenant: str) -> None:
    for text in ("1", "2"):
        await records.put("batch", tenant, "a", Note(text), expect=None)
    found = await records.get("batch", tenant, "a", Note)
    assert found is not None
    assert found[0] == Note("2")


async def test_a_deleted_record_is_gone_and_a_late_change_of_it_fails(
    records: Records, tenant: str
) -> None:
    revision = await records.put("file", tenant, "a", Note("1"), expect=0)
    await records.delete("file", tenant, "a", expect=revision)
    assert await records.get("file", tenant, "a", Note) is None
    assert (await records.list("file", tenant, Note)).records == []
    assert tenant not in {record.tenant async for record in records.every("file", Note)}
    with pytest.raises(ConflictError):
        await records.put("file", tenant, "a", Note("late"), expect=revision)
    await records.put("file", tenant, "a", Note("anew"), expect=0)
    found = await records.get("file", tenant, "a", Note)
    assert found is not None
    assert found[0] == Note("anew")


async def test_a_list_goes_from_the_newest_on_page_by_page(records: Records, tenant: str) -> None:
    ids = [f"note-{number:03}" for number in range(150)]
    async with asyncio.TaskGroup() as group:
        for record_id in ids:
            group.create_task(records.put("file", tenant, record_id, Note(record_id), expect=0))
    page = await records.list("file", tenant, Note, limit=100)
    assert [record.record_id for record in page.records] == ids[:49:-1]
    assert page.has_more
    rest = await records.list("file", tenant, Note, limit=100, after=ids[50])
    assert [record.value.text for record in rest.records] == ids[49::-1]
    assert not rest.has_more
    odd = await records.list(
        "file",
        tenant,
        Note,
        limit=2,
        newest_first=False,
        where=lambda note: note.text.endswith("9"),
    )
    assert [record.record_id for record in odd.records] == ["note-009", "note-019"]
    assert odd.has_more


async def test_a_list_holds_one_kind_and_one_tenant(records: Records, tenant: str) -> None:
    await records.put("file", tenant, "a", Note("mine"), expect=0)
    await records.put("batch", tenant, "b", Note("another kind"), expect=0)
    await records.put("file", f"{tenant}-2", "c", Note("another tenant"), expect=0)
    page = await records.list("file", tenant, Note)
    assert [record.record_id for record in page.records] == ["a"]
    every = {(r.tenant, r.record_id): r.value.text async for r in records.every("file", Note)}
    assert every[tenant, "a"] == "mine"
    assert every[f"{tenant}-2", "c"] == "another tenant"
    assert (tenant, "b") not in every
    for bad in ("*", ">", "a.b"):
        with pytest.raises(MalformedMessageError):
            await records.list("file", bad, Note)
        with pytest.raises(MalformedMessageError):
            await records.get("file", tenant, bad, Note)


async def test_a_record_vanishes_after_its_time(records: Records, tenant: str) -> None:
    await records.put("idem", tenant, "a", Note("short"), expect=0, ttl_s=0.5)
    await records.put("idem", tenant, "b", Note("long"), expect=0, ttl_s=600)
    async with asyncio.timeout(TIMEOUT_S):
        while await records.get("idem", tenant, "a", Note) is not None:
            continue
    assert await records.get("idem", tenant, "b", Note) is not None
    await records.put("idem", tenant, "a", Note("anew"), expect=0)


async def test_who_watches_hears_of_each_change(records: Records, tenant: str) -> None:
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    watching = await records.watch("batch", lambda *named: heard.put_nowait(named))
    await records.put("batch", tenant, "a", Note("1"), expect=0)
    async with asyncio.timeout(TIMEOUT_S):
        while await heard.get() != (tenant, "a"):
            continue
    await watching.unsubscribe()


async def test_a_record_that_is_too_large_is_refused(records: Records, tenant: str) -> None:
    with pytest.raises(PayloadTooLargeError, match="exceed the limit of 262,144 for a record"):
        await records.put("resp", tenant, "a", Note("x" * MAX_RECORD_BYTES), expect=0)


async def test_a_record_of_another_shape_is_named(records: Records, tenant: str) -> None:
    class Other(msgspec.Struct):
        number: int

    await records.put("file", tenant, "a", Note("1"), expect=0)
    with pytest.raises(MalformedMessageError, match=rf"hr\.v1\.meta\.{tenant}\.file\.a"):
        await records.get("file", tenant, "a", Other)
    assert tenant not in {record.tenant async for record in records.every("file", Other)}


def test_a_later_id_is_greater() -> None:
    ids = [new_id("file-") for _ in range(3)]
    assert len(set(ids)) == 3
    assert [i[: len("file-") + 12] for i in ids] == sorted(i[: len("file-") + 12] for i in ids)
