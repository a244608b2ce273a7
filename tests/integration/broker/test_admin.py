"""What an operator sees of streams and takes out of them."""

from __future__ import annotations

import pytest

from headrace.shared import subjects
from headrace.shared.broker import CLIENT, Broker, WorkQueue
from headrace.shared.broker import admin as admin_module
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role


async def dead(broker: Broker, slug: str, *payloads: bytes) -> list[int]:
    """Store payloads as dead letters and return their sequences."""
    for number, payload in enumerate(payloads):
        subject = subjects.dead_letter(Role.DECODE, slug)
        await broker.publish_durable(subject, payload, message_id=f"{slug}.{number}")
    return [kept.sequence async for kept in broker.admin.messages("HR_DLQ", f"hr.v1.dlq.*.{slug}")]


async def test_messages_are_read_page_by_page_and_whole(
    broker: Broker, slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "PAGE", 2)
    payloads = [b"1", bytes(10_000_000), b"3", b"4", b"5"]  # the second is stored in parts
    await dead(broker, slug, *payloads)
    kept = [k async for k in broker.admin.messages("HR_DLQ", f"hr.v1.dlq.*.{slug}")]
    assert [k.received.payload for k in kept] == payloads
    assert kept[0].received.subject == subjects.dead_letter(Role.DECODE, slug)
    assert kept[0].stored <= kept[-1].stored
    again = await broker.admin.message("HR_DLQ", kept[1].sequence)
    assert again is not None
    assert again.received.payload == payloads[1]


async def test_one_message_is_deleted_once_and_the_others_stay(broker: Broker, slug: str) -> None:
    one, two, three = await dead(broker, slug, b"1", b"2", b"3")
    for sequence in (two, three):
        assert await broker.admin.delete("HR_DLQ", sequence)
        assert not await broker.admin.delete("HR_DLQ", sequence)
        assert await broker.admin.message("HR_DLQ", sequence) is None
    assert not await broker.admin.delete("HR_DLQ", three + 100)
    kept = [k async for k in broker.admin.messages("HR_DLQ", f"hr.v1.dlq.*.{slug}")]
    assert [k.sequence for k in kept] == [one]


async def test_a_purge_leaves_what_came_later_and_what_is_of_others(
    broker: Broker, slug: str
) -> None:
    mine, others = subjects.out("acme", slug), subjects.out("acme", f"{slug}-2")
    for number, subject in enumerate((mine, others, mine, mine)):
        await broker.publish_durable(subject, str(number).encode(), message_id=f"{slug}.{number}")
    second = (await broker.replay(mine))[1]
    await broker.admin.purge("HR_OUT", mine, up_to=int(second.headers["Nats-Sequence"]))
    assert [m.payload for m in await broker.replay(mine)] == [b"3"]
    assert [m.payload for m in await broker.replay(others)] == [b"1"]


async def test_a_queue_tells_what_waits_and_what_is_taken(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    for number in range(3):
        subject = subjects.req("acme", slug, Lane.STD)
        await broker.publish_durable(subject, bytes(3_000_000), message_id=f"{slug}.{number}")
    delivery = await broker.take(WorkQueue.req(slug, Lane.STD), wait_s=5)
    assert delivery is not None
    pattern = subjects.req_filter(slug, Lane.STD)
    (info,) = [q for q in await broker.admin.queues("HR_REQ") if q.filter_subject == pattern]
    assert (info.num_waiting, info.num_taken, info.num_deliveries) == (2, 1, 1)
    assert info.last_delivered == delivery.sequence
    # Also the first of several that are too large to be looked at together.
    (oldest,) = await broker.admin.first("HR_REQ", pattern, first_seq=info.last_delivered + 1)
    assert oldest.sequence > delivery.sequence
    (taken,) = await broker.admin.first("HR_REQ", pattern)
    assert taken.sequence == delivery.sequence


async def test_all_consumers_of_a_stream_are_told_however_many_there_are(
    own_server: NatsServer,
) -> None:
    settings = BrokerSettings(url=own_server.url)
    broker = await Broker.connect(settings, role=Role.PREFILL, name="x")
    queues = [WorkQueue.prefill(f"m-{number}", Lane.RT) for number in range(300)]
    for queue in queues:  # the broker tells of 256 at once
        await broker.declare_queue(queue)
    found = {queue.filter_subject for queue in await broker.admin.queues("HR_PF")}
    assert found == {queue.filter_subject for queue in queues}
    await broker.close()


async def test_a_broker_without_streams_has_nothing_to_tell(
    own_server: NatsServer,
) -> None:
    settings = BrokerSettings(url=own_server.url)
    broker = await Broker.connect(settings, role=CLIENT, name="x")
    assert [k async for k in broker.admin.messages("HR_DLQ", "hr.v1.dlq.*.*")] == []
    assert await broker.admin.message("HR_DLQ", 1) is None
    assert not await broker.admin.delete("HR_DLQ", 1)
    assert await broker.admin.num_messages("HR_DLQ") == 0
    assert await broker.admin.queues("HR_REQ") == []
    await broker.close()
