"""A batch whose owners die, are stopped, or live on: one result a line, and nothing is run again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.batch.errors import NotOwnerError
from headrace.batch.ownership import Owned
from headrace.batch.part_log import PartLog
from headrace.batch.results import NO_USAGE
from headrace.shared.broker import Delivery
from headrace.shared.errors import BrokerError
from headrace.shared.files import BrokerFiles
from headrace.shared.nats_server import NatsServer
from headrace.shared.records import new_id
from headrace.shared.subjects import Role

from .conftest import STAGES, TENANT, WITHIN_S, Batches, Engines, Pipeline, check

pytestmark = pytest.mark.usefixtures("quick_takeover")


async def test_a_killed_owner_is_succeeded_and_no_line_is_run_twice(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    (first,) = await pipeline.start(Role.BATCH)
    lines = batches.lines(200)
    batch_id = await batches.create(lines)
    await engines[0].until_started(20)
    engines[0].faults.hold = True
    await engines[0].wait_until(lambda _: engines[0].num_held > 0)
    await first.kill()
    engines[0].release()
    await pipeline.start(Role.BATCH)
    record = await batches.until(batch_id)
    assert record.status == "completed"
    assert (
        record.epoch >= 2
    )  # more, where an owner stood still for longer than the second that it has
    check(lines, *await batches.results(batch_id))
    assert engines[0].num_started == len(lines)


async def test_an_owner_that_drains_leaves_its_batch_to_the_next_one_at_once(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    patient = msgspec.structs.replace(pipeline.settings.batch, drain_timeout_s=3_600)
    (first,) = await pipeline.start(
        Role.BATCH, settings=msgspec.structs.replace(pipeline.settings, batch=patient)
    )
    engines[0].faults.hold = True
    lines = batches.lines(30)
    batch_id = await batches.create(lines)
    await engines[0].until_running(8)
    async with asyncio.timeout(WITHIN_S):
        await first.drain()
    record = await batches.get(batch_id)
    assert (record.status, record.num_idle_owners) == ("in_progress", 0)
    assert engines[0].num_running == 8
    engines[0].release()
    engines[0].faults.hold = False
    await pipeline.start(Role.BATCH)
    assert (await batches.until(batch_id)).epoch >= 2
    check(lines, *await batches.results(batch_id))
    assert engines[0].num_started == len(lines)


@contextlib.asynccontextmanager
async def no_sign(self: Delivery) -> AsyncIterator[None]:
    yield


async def test_an_owner_that_lives_still_stops_when_another_one_has_taken_over(
    pipeline: Pipeline,
    batches: Batches,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    engines[0].faults.hold = True
    lines = batches.lines(100)
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "keep_alive", no_sign)
        batch_id = await batches.create(lines)
        await engines[0].until_running(8)
    await pipeline.start(Role.BATCH)
    await batches.until(batch_id, lambda record: record.epoch >= 2)
    engines[0].release()
    engines[0].faults.hold = False
    record = await batches.until(batch_id)
    assert record.status == "completed"
    check(lines, *await batches.results(batch_id))
    assert engines[0].num_started == len(lines)
    assert any("belongs to" in message or "another owner" in message for message in caplog.messages)


async def test_a_cancel_reaches_what_an_earlier_owner_has_begun(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    (first,) = await pipeline.start(Role.BATCH)
    engines[0].faults.hold = True
    lines = batches.lines(60)
    batch_id = await batches.create(lines)
    await engines[0].until_running(8)
    await first.kill()
    await batches.cancel(batch_id)
    await pipeline.start(Role.BATCH)
    record = await batches.until(batch_id)
    assert record.status == "cancelled"
    check(lines, *await batches.results(batch_id))
    await engines[0].until_running(0)
    assert engines[0].num_started == 8


async def test_a_batch_goes_on_behind_a_broker_that_was_killed(
    pipeline: Pipeline, batches: Batches, engines: Engines, nats_server: NatsServer
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    lines = batches.lines(400)
    batch_id = await batches.create(lines)
    await engines[0].until_started(20)
    nats_server.kill()
    await nats_server.start()
    record = await batches.until(batch_id)
    assert record.status == "completed"
    check(lines, *await batches.results(batch_id))


async def test_a_batch_that_no_owner_brings_any_further_fails(
    pipeline: Pipeline, batches: Batches
) -> None:
    batch_id = await batches.create(batches.lines(1))
    await batches.change(batch_id, num_idle_owners=10)
    await pipeline.start(Role.BATCH)
    record = await batches.until(batch_id)
    assert (record.status, record.errors[0].code) == ("failed", "server_error")


async def test_an_earlier_owner_can_change_the_record_no_more(batches: Batches) -> None:
    batch_id = await batches.create(batches.lines(1))
    first = await Owned.take(batches.records, TENANT, batch_id, "batch-1")
    second = await Owned.take(batches.records, TENANT, batch_id, "batch-2")
    assert first is not None
    assert second is not None
    with pytest.raises(NotOwnerError, match="belongs to batch-2 now"):
        await first.change(lambda _: {"model": "m"})
    with pytest.raises(NotOwnerError):
        await first.refresh()
    assert (await second.change(lambda _: {"model": "m"})).model == "m"
    await second.change(lambda _: {"status": "completed"})
    assert await Owned.take(batches.records, TENANT, batch_id, "batch-3") is None


async def test_a_cancel_is_not_lost_under_what_the_owner_writes(batches: Batches) -> None:
    batch_id = await batches.create(batches.lines(1))
    owned = await Owned.take(batches.records, TENANT, batch_id, "batch-1")
    assert owned is not None
    await batches.cancel(batch_id)
    record = await owned.change(lambda _: {"model": "m"})
    assert (record.status, record.model) == ("cancelling", "m")


async def test_an_earlier_owner_can_store_no_part_once_another_one_has_read_the_file(
    batches: Batches,
) -> None:
    file_id = new_id("file-")
    first = PartLog(batches.store, TENANT, file_id, 1)
    await first.take_over()
    await first.append(b"one\n", [1], NO_USAGE)
    second = PartLog(batches.store, TENANT, file_id, 2)
    await second.take_over()
    assert second.content.lines == {1}
    with pytest.raises(NotOwnerError):
        await first.append(b"two\n", [2], NO_USAGE)
    await second.append(b"zwei\n", [2], NO_USAGE)
    third = PartLog(batches.store, TENANT, file_id, 3)
    await third.take_over()
    assert (third.content.lines, third.content.num_bytes) == ({1, 2}, 9)
    with pytest.raises(NotOwnerError):
        await PartLog(batches.store, TENANT, file_id, 2).take_over()


class Unanswered(BrokerFiles):
    """A store whose next answer is lost."""

    is_lost = False

    async def append_part(self, *args: object, **more: object) -> None:
        await super().append_part(*args, **more)  # type: ignore[arg-type]
        if self.is_lost:
            self.is_lost = False
            raise BrokerError("no publish ack")


async def test_a_part_whose_ack_was_lost_is_stored_once(pipeline: Pipeline) -> None:
    store = Unanswered(pipeline.broker)
    log = PartLog(store, TENANT, new_id("file-"), 1)
    await log.take_over()
    store.is_lost = True
    await log.append(b"one\n", [1], NO_USAGE)
    await log.append(b"two\n", [2], NO_USAGE)
    parts = [part.data async for part in store.parts(TENANT, log.file_id)]
    assert parts == [b"one\n", b"two\n"]
