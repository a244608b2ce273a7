"""Core messages, requests, replays, and payloads of any size."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable

import pytest

from headrace.shared import subjects
from headrace.shared.broker import Broker, Received, WorkQueue
from headrace.shared.errors import BrokerError, NoWorkerError, PayloadTooLargeError
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane

MIB = 2**20


def collector(count: int) -> tuple[Callable[[Received], None], asyncio.Future[list[Received]]]:
    """Return a handler and what completes once it was called `count` times."""
    done: asyncio.Future[list[Received]] = asyncio.get_running_loop().create_future()
    received: list[Received] = []

    def handle(message: Received) -> None:
        received.append(message)
        if len(received) == count:
            done.set_result(received)

    return handle, done


async def test_a_message_reaches_its_subscriber_with_headers(broker: Broker, slug: str) -> None:
    handle, done = collector(1)
    await broker.subscribe(subjects.frames(slug), handle)
    await broker.publish(subjects.frames(slug), b"frame", {"traceparent": "00-1"})
    (message,) = await asyncio.wait_for(done, 10)
    assert (message.subject, message.payload) == (subjects.frames(slug), b"frame")
    assert message.headers == {"traceparent": "00-1"}
    assert message.reply == ""


async def test_a_subscription_is_known_to_the_broker_when_subscribe_returns(
    broker: Broker, broker_settings: BrokerSettings, slug: str
) -> None:
    asker = await Broker.connect(broker_settings, role="test", name="asker")
    for number in range(100):
        subject = subjects.derender_open(f"{slug}-{number}")
        answers: list[asyncio.Task[None]] = []

        def answer(received: Received, answers: list[asyncio.Task[None]] = answers) -> None:
            answers.append(asyncio.create_task(broker.respond(received, b"mine")))

        subscription = await broker.subscribe(subject, answer, queue="derender")
        assert await asker.request(subject, b"", timeout_s=5) == b"mine"
        await asyncio.gather(*answers)
        await subscription.unsubscribe()
        with pytest.raises(NoWorkerError):
            await asker.request(subject, b"", timeout_s=5)
    await asker.close()


async def test_the_broker_has_answered_a_ping_that_was_written_after_the_subscription(
    broker: Broker, slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = broker._data._nc._transport
    assert transport is not None
    written: list[bytes] = []
    write, writelines = transport.write, transport.writelines

    def record(data: bytes) -> None:
        written.append(data)
        write(data)

    def record_lines(lines: list[bytes]) -> None:
        written.extend(lines)
        writelines(lines)

    monkeypatch.setattr(transport, "write", record)
    monkeypatch.setattr(transport, "writelines", record_lines)
    subscription = await broker.subscribe(subjects.frames(slug), lambda _: None)
    wire = b"".join(written)
    assert wire.rindex(b"PING") > wire.index(b"SUB ")
    written.clear()
    await subscription.unsubscribe()
    wire = b"".join(written)
    assert wire.rindex(b"PING") > wire.index(b"UNSUB ")


async def test_a_request_that_nobody_hears_is_no_worker(broker: Broker, slug: str) -> None:
    with pytest.raises(NoWorkerError, match="nobody listens"):
        await broker.request(subjects.derender_open(slug), b"", timeout_s=5)


async def test_a_request_that_is_not_answered_is_a_broker_error(broker: Broker, slug: str) -> None:
    await broker.subscribe(subjects.derender_open(slug), lambda _: None)
    with pytest.raises(BrokerError, match=r"no answer within 0\.1 s"):
        await broker.request(subjects.derender_open(slug), b"", timeout_s=0.1)


async def test_a_message_that_awaits_no_answer_cannot_be_answered(broker: Broker) -> None:
    with pytest.raises(BrokerError, match="awaits no answer"):
        await broker.respond(Received("hr.v1.frames.x", b"", {}, ""), b"")


async def test_unsubscribe_returns_after_what_has_arrived_is_handled(
    broker: Broker, broker_settings: BrokerSettings, slug: str
) -> None:
    handled: list[bytes] = []
    sender = await Broker.connect(broker_settings, role="test", name="sender")
    subscription = await broker.subscribe(
        subjects.frames(slug), lambda received: handled.append(received.payload)
    )
    for number in range(500):
        await sender.publish(subjects.frames(slug), b"%d" % number)
    await sender.close()  # flushes: the broker has them all
    await subscription.unsubscribe()
    await subscription.unsubscribe()  # twice does no harm
    assert handled == [b"%d" % number for number in range(500)]


async def test_one_handler_that_fails_does_not_end_the_subscription(
    broker: Broker, slug: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle, done = collector(2)

    def fail_first(received: Received) -> None:
        handle(received)
        if received.payload == b"bad":
            raise ZeroDivisionError("a bug")

    await broker.subscribe(subjects.frames(slug), fail_first)
    await broker.publish(subjects.frames(slug), b"bad")
    await broker.publish(subjects.frames(slug), b"good")
    assert [m.payload for m in await asyncio.wait_for(done, 10)] == [b"bad", b"good"]
    assert "a handler failed: a bug" in caplog.text


async def test_20_mb_go_through_a_work_queue(broker: Broker, slug: str) -> None:
    payload = os.urandom(20 * MIB)
    await broker.declare_model(slug)
    subject = subjects.job(slug, "acme", Lane.RT)
    waiting = asyncio.create_task(broker.take(WorkQueue.job(slug, Lane.RT), wait_s=30))
    assert await broker.publish_durable(subject, payload, message_id=uuid.uuid4().hex)
    delivery = await waiting
    assert delivery is not None
    assert delivery.payload == payload
    assert "Hr-Blob" not in delivery.headers
    await delivery.ack()


async def test_20_mb_go_through_a_request_and_back(broker: Broker, slug: str) -> None:
    question, answer = os.urandom(20 * MIB), os.urandom(20 * MIB)
    heard: list[bytes] = []
    tasks: set[asyncio.Task[None]] = set()

    def respond(received: Received) -> None:
        heard.append(received.payload)
        tasks.add(asyncio.create_task(broker.respond(received, answer)))

    await broker.subscribe(subjects.derender_open(slug), respond)
    assert await broker.request(subjects.derender_open(slug), question, timeout_s=30) == answer
    assert heard == [question]


async def test_large_and_small_messages_keep_their_order(broker: Broker, slug: str) -> None:
    handle, done = collector(9)
    await broker.subscribe(subjects.frames(slug), handle)
    sent = [os.urandom(5 * MIB if number % 3 == 0 else 10) for number in range(9)]
    for payload in sent:
        await broker.publish(subjects.frames(slug), payload)
    assert [m.payload for m in await asyncio.wait_for(done, 30)] == sent


async def test_a_payload_above_the_limit_is_refused_by_name(broker: Broker, slug: str) -> None:
    payload = bytes(64 * MIB + 1)
    with pytest.raises(PayloadTooLargeError, match=r"67,108,865 bytes .* 67,108,864 bytes"):
        await broker.publish(subjects.frames(slug), payload)
    with pytest.raises(PayloadTooLargeError):
        await broker.publish_durable(subjects.job(slug, "acme", Lane.RT), payload, message_id="x")
    with pytest.raises(PayloadTooLargeError):
        await broker.request(subjects.frames(slug), payload, timeout_s=1)


async def test_a_blob_comes_back_as_it_was(broker: Broker) -> None:
    for data in (b"", b"small", os.urandom(3 * MIB + 7)):
        assert await broker.get_blob(await broker.put_blob(data)) == data


async def test_a_blob_that_is_not_there_or_not_itself_is_an_error(broker: Broker) -> None:
    ref = await broker.put_blob(b"one")
    blob_id, parts, size, digest = ref.split(".")
    for wrong in (
        f"{uuid.uuid4().hex}.{parts}.{size}.{digest}",
        f"{blob_id}.{parts}.{size}.{'0' * 64}",
        f"{blob_id}.{parts}.4.{digest}",
        "nonsense",
        "a.*.3.b",
        f"a b.{parts}.{size}.{digest}",
    ):
        with pytest.raises(BrokerError, match="blob"):
            await broker.get_blob(wrong)


async def test_a_job_whose_blob_is_gone_arrives_empty_with_its_ref(
    broker: Broker, slug: str
) -> None:
    await broker.declare_model(slug)
    ref = f"{uuid.uuid4().hex}.1.1.{'0' * 64}"
    await broker.publish_durable(
        subjects.job(slug, "acme", Lane.STD), b"", message_id=slug, headers={"Hr-Blob": ref}
    )
    delivery = await broker.take(WorkQueue.job(slug, Lane.STD), wait_s=10)
    assert delivery is not None
    assert (delivery.payload, delivery.headers["Hr-Blob"]) == (b"", ref)
    await delivery.term("its payload is gone")


async def test_a_replay_gives_one_subject_in_order(broker: Broker, slug: str) -> None:
    wanted, other = subjects.out("acme", slug), subjects.out("acme", f"{slug}-other")
    payloads = [b"%d" % number for number in range(600)]
    payloads[300] = os.urandom(5 * MIB)
    for payload in payloads:
        await broker.publish(wanted, payload)
        await broker.publish(other, b"not this one")
    await broker.publish_durable(wanted, b"end", message_id=slug)
    replayed = await broker.replay(wanted)
    assert [m.payload for m in replayed] == [*payloads, b"end"]
    assert {m.subject for m in replayed} == {wanted}
    later = await broker.replay(wanted, from_seq_of=int(replayed[599].headers["Nats-Sequence"]))
    assert [m.payload for m in later] == [payloads[599], b"end"]


async def test_a_replay_of_nothing_is_empty(broker: Broker, slug: str) -> None:
    assert await broker.replay(subjects.out("acme", slug)) == []
    assert await broker.last(subjects.out("acme", slug)) is None


async def test_a_closed_broker_says_so(broker_settings: BrokerSettings) -> None:
    broker = await Broker.connect(broker_settings, role="test", name="test")
    await broker.close()
    await broker.close()
    assert not broker.is_connected
    with pytest.raises(BrokerError, match="closed"):
        await broker.publish("hr.v1.frames.x", b"")
    with pytest.raises(BrokerError, match="closed"):
        await broker.take(WorkQueue.prefill("m", Lane.RT), wait_s=1)


@pytest.mark.parametrize(
    "ref", ["x.99999999999.5.abc", "x.-1.0.abc", "x.1.-1.abc", "x.1.99999999999.abc", "x.1.1"]
)
async def test_a_ref_that_no_blob_can_have_is_refused_before_it_costs_anything(
    broker: Broker, ref: str
) -> None:
    with pytest.raises(BrokerError, match="blob ref must be"):
        await broker.get_blob(ref)
