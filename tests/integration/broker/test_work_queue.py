"""Taking from work queues: every message to one taker, and none lost when a taker leaves."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest

from headrace.shared import subjects
from headrace.shared.broker import Broker, Delivery, WorkQueue
from headrace.shared.broker.jetstream import api
from headrace.shared.broker.work_queue import UNUSED_WORKER_S
from headrace.shared.errors import BrokerError, QueueFullError
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role

RT = Lane.RT


async def put(
    broker: Broker, slug: str, payload: bytes, *, lane: Lane = RT, **more: object
) -> bool:
    return await broker.publish_durable(
        subjects.job(slug, "acme", lane), payload, message_id=uuid.uuid4().hex, headers={"H": "v"}
    )


async def take(broker: Broker, queue: WorkQueue, wait_s: float = 10) -> Delivery:
    delivery = await broker.take(queue, wait_s=wait_s)
    assert delivery is not None
    return delivery


async def test_a_message_is_taken_once_and_gone_after_its_ack(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    assert await put(broker, slug, b"one")
    delivery = await take(broker, queue)
    assert (delivery.payload, delivery.headers["H"]) == (b"one", "v")
    assert delivery.subject == subjects.job(slug, "acme", RT)
    assert delivery.num_delivered == 1
    await delivery.ack()
    assert await broker.take(queue, wait_s=0) is None
    await put(broker, slug, b"two")
    assert (await take(broker, queue)).published > delivery.published > 1.7e9


async def test_declaring_a_model_and_connecting_again_change_nothing(
    broker: Broker, broker_settings: BrokerSettings, slug: str
) -> None:
    await broker.declare_model(slug)
    await put(broker, slug, b"kept")
    other = await Broker.connect(broker_settings, role="test", name="other")
    await other.declare_model(slug)
    assert (await take(other, WorkQueue.job(slug, RT))).payload == b"kept"
    await other.close()


@pytest.mark.parametrize("lane", list(Lane))
async def test_each_lane_of_a_submission_is_its_own_queue(
    broker: Broker, slug: str, lane: Lane
) -> None:
    await broker.declare_model(slug)
    await broker.publish_durable(
        subjects.req("acme", slug, lane), lane.encode(), message_id=uuid.uuid4().hex
    )
    others = [await broker.take(WorkQueue.req(slug, x), wait_s=0) for x in Lane if x is not lane]
    assert others == [None, None]
    delivery = await take(broker, WorkQueue.req(slug, lane))
    assert delivery.payload == lane.encode()
    await delivery.ack()


async def test_two_takers_share_the_messages_and_hold_no_more_than_they_asked_for(
    broker: Broker, broker_settings: BrokerSettings, slug: str
) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.prefill(slug, RT)
    second = await Broker.connect(broker_settings, role="test", name="second")
    for number in range(20):
        await broker.publish_durable(
            subjects.prefill(slug, RT), b"%d" % number, message_id=f"{slug}.{number}"
        )
    held = await asyncio.gather(
        *(take(broker, queue) for _ in range(3)), *(take(second, queue) for _ in range(2))
    )
    assert len({d.payload for d in held}) == 5
    rest = [await take(second, queue) for _ in range(15)]
    assert len({d.payload for d in [*held, *rest]}) == 20
    assert await broker.take(queue, wait_s=0) is None
    for delivery in [*held, *rest]:
        await delivery.ack()
    await second.close()


async def test_many_takes_wait_at_once_and_each_gets_one(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    waiting = [asyncio.create_task(take(broker, queue)) for _ in range(50)]
    for number in range(50):
        await put(broker, slug, b"%d" % number)
    got = await asyncio.gather(*waiting)
    assert {int(d.payload) for d in got} == set(range(50))
    assert {d.num_delivered for d in got} == {1}
    await asyncio.gather(*(d.ack() for d in got))


async def test_a_take_without_a_message_ends_with_none(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    assert await broker.take(WorkQueue.job(slug, RT), wait_s=0) is None
    assert await broker.take(WorkQueue.job(slug, RT), wait_s=0.05) is None


async def test_a_take_from_an_undeclared_queue_names_what_is_missing(broker: Broker) -> None:
    with pytest.raises(
        BrokerError, match="HR_JOB_RT has no consumer nobody_rt: call declare_model"
    ):
        await broker.take(WorkQueue.job("nobody", RT), wait_s=1)


async def test_a_message_given_back_comes_again_and_says_so(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    await put(broker, slug, b"again")
    await (await take(broker, queue)).nak()
    second = await take(broker, queue)
    assert second.num_delivered == 2
    await second.nak(delay_s=0.3)
    assert await broker.take(queue, wait_s=0) is None
    third = await take(broker, queue)
    assert third.num_delivered == 3
    await third.ack()


async def test_a_terminated_message_never_comes_again(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    await put(broker, slug, b"poison")
    await (await take(broker, queue)).term("cannot be read")
    assert await broker.take(queue, wait_s=0) is None


async def test_a_message_kept_alive_is_not_delivered_again(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    # The same stream, with a consumer that waits only a short time for a sign of life.
    hasty = WorkQueue(
        "HR_PF", f"{slug}-hasty", f"{subjects.prefill(slug, RT)}.hasty", 0.6, Role.PREFILL
    )
    await broker._topology.declare_consumer(broker._control, hasty)
    await broker.publish_durable(hasty.filter_subject, b"long", message_id=uuid.uuid4().hex)
    held = await take(broker, hasty)
    async with held.keep_alive():
        assert await broker.take(hasty, wait_s=2) is None
    again = await take(broker, hasty)  # nobody keeps it alive any more
    assert (again.payload, again.num_delivered) == (b"long", 2)
    await again.ack()


@pytest.mark.parametrize("lane", Lane)
async def test_what_a_killed_worker_held_comes_again_within_ten_seconds_in_every_lane(
    broker: Broker, slug: str, lane: Lane
) -> None:
    await broker.declare_model(slug)
    for queue in (
        WorkQueue.req(slug, lane),
        WorkQueue.job(slug, lane),
        WorkQueue.prefill(slug, lane),
    ):
        info = await api(broker._control, f"CONSUMER.INFO.{queue.stream}.{queue.consumer}")
        assert info["config"]["ack_wait"] <= 10 * 10**9
        assert info["config"]["ack_wait"] == queue.ack_wait_s * 10**9  # by which it is kept alive


async def test_what_a_cancelled_take_would_get_goes_to_the_next_one_at_once(
    broker: Broker, slug: str
) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    for number in range(30):
        abandoned = [asyncio.create_task(broker.take(queue, wait_s=30)) for _ in range(4)]
        for _ in range(number % 5):  # left at different points of the take
            await asyncio.sleep(0)
        if number % 2:
            await broker._control.flush()  # their pulls wait at the broker
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        await put(broker, slug, b"%d" % number)
        delivery = await take(broker, queue, wait_s=5)  # half of ack_wait
        assert delivery.payload == b"%d" % number
        await delivery.ack()


async def test_a_cancelled_take_is_withdrawn_and_costs_no_delivery(
    broker: Broker, slug: str
) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    abandoned = [asyncio.create_task(broker.take(queue, wait_s=30)) for _ in range(8)]
    await asyncio.sleep(0)
    await broker._control.flush()
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)
    await asyncio.gather(*broker._control._tasks)  # the withdrawals
    await put(broker, slug, b"one")
    delivery = await take(broker, queue)
    assert delivery.num_delivered == 1
    await delivery.ack()


async def test_a_message_on_its_way_to_a_cancelled_take_is_given_back(
    broker: Broker, slug: str
) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    for number in range(30):
        abandoned = asyncio.create_task(broker.take(queue, wait_s=30))
        await asyncio.sleep(0)
        await broker._control.flush()
        publishing = asyncio.create_task(put(broker, slug, b"%d" % number))
        for _ in range(number):  # the message is somewhere between the broker and here
            await asyncio.sleep(0)
        abandoned.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if (early := await abandoned) is not None:
                await early.nak()
        await publishing
        delivery = await take(broker, queue, wait_s=5)
        assert delivery.payload == b"%d" % number
        await delivery.ack()


async def test_the_same_message_id_is_stored_once(broker: Broker, slug: str) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    subject = subjects.job(slug, "acme", RT)
    assert await broker.publish_durable(subject, b"a", message_id=f"{slug}.1") is True
    assert await broker.publish_durable(subject, b"b", message_id=f"{slug}.1") is False
    delivery = await take(broker, queue)
    assert delivery.payload == b"a"
    await delivery.ack()
    assert await broker.publish_durable(subject, b"c", message_id=f"{slug}.1") is False
    assert await broker.take(queue, wait_s=0) is None


async def test_only_the_first_result_of_a_request_is_kept(broker: Broker, slug: str) -> None:
    subject = subjects.res("acme", slug)
    first = await broker.publish_durable(subject, b"first", message_id=f"{slug}.a", expect_last=0)
    second = await broker.publish_durable(subject, b"second", message_id=f"{slug}.b", expect_last=0)
    assert (first, second) == (True, False)
    kept = await broker.last(subject)
    assert kept is not None
    assert kept.payload == b"first"


async def test_a_full_queue_refuses_at_once_and_names_the_setting(
    own_server: NatsServer,
) -> None:
    settings = BrokerSettings(url=own_server.url, max_queued_per_subject=2)
    broker = await Broker.connect(settings, role="test", name="test")
    await broker.declare_model("m")
    for tenant in ("acme", "other"):
        subject = subjects.req(tenant, "m", Lane.BULK)
        for number in range(2):
            await broker.publish_durable(subject, b"x", message_id=f"{tenant}.{number}")
        with pytest.raises(QueueFullError, match="max_queued_per_subject") as caught:
            await broker.publish_durable(subject, b"x", message_id=f"{tenant}.3")
        assert caught.value.http_status == 429
    # A changed setting reaches the stream that is already there.
    wider = BrokerSettings(url=settings.url, max_queued_per_subject=3)
    other = await Broker.connect(wider, role="test", name="other")
    subject = subjects.req("acme", "m", Lane.BULK)
    assert await other.publish_durable(subject, b"x", message_id="acme.4")
    await other.close()
    await broker.close()


async def test_a_subject_without_a_stream_is_refused(broker: Broker) -> None:
    with pytest.raises(BrokerError, match="captured by no stream"):
        await broker.publish_durable(subjects.kv("x"), b"x", message_id="1")


async def test_a_take_of_last_resort_gets_nothing_that_another_take_waits_for(
    broker: Broker, broker_settings: BrokerSettings, slug: str
) -> None:
    await broker.declare_model(slug)
    queue = WorkQueue.job(slug, RT)
    free = await Broker.connect(broker_settings, role="test", name="free")
    last = asyncio.create_task(broker.take(queue, wait_s=30, is_last_resort=True))
    # What a full worker waits for must have reached the broker before: it is first in line.
    assert await broker.take(WorkQueue.job(slug, Lane.BULK), wait_s=0) is None
    first = asyncio.create_task(free.take(queue, wait_s=30))
    assert await free.take(WorkQueue.job(slug, Lane.BULK), wait_s=0) is None
    for payload, taker in ((b"one", first), (b"two", last)):
        await put(broker, slug, payload)
        delivery = await taker
        assert delivery is not None
        assert delivery.payload == payload
        await delivery.ack()
    await free.close()


async def test_a_workers_own_queue_is_made_again_when_the_broker_has_dropped_it(
    broker: Broker, slug: str
) -> None:
    """As after a minute in which the worker had no slot free, and took nothing."""
    own = WorkQueue.prefill_worker(slug, "prefill-1")
    assert own.config(1)["inactive_threshold"] == UNUSED_WORKER_S * 10**9
    await broker.declare_queue(own)
    await api(broker._control, f"CONSUMER.DELETE.{own.stream}.{own.consumer}")
    await broker.publish_durable(
        subjects.prefill_worker(slug, "prefill-1"), b"task", message_id=slug
    )
    assert await broker.take(own, wait_s=1) is None
    delivery = await take(broker, own)
    assert delivery.payload == b"task"
    await delivery.ack()


async def test_a_workers_own_queue_is_there_again_after_the_broker_restarted(
    own_server: NatsServer,
) -> None:
    broker = await Broker.connect(BrokerSettings(url=own_server.url), role="test", name="test")
    own, back = WorkQueue.prefill_worker("m", "prefill-1"), asyncio.Event()
    await broker.declare_queue(own)

    async def on_reconnect() -> None:
        back.set()

    broker.on_reconnect(on_reconnect)
    own_server.kill()
    await own_server.restart()
    await back.wait()
    info = await api(broker._control, f"CONSUMER.INFO.{own.stream}.{own.consumer}")
    assert info["config"]["filter_subject"] == own.filter_subject
    await broker.close()
