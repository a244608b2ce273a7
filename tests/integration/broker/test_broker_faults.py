"""The broker dies, comes late, or comes back empty."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.shared import subjects
from headrace.shared.broker import Broker, Received, WorkQueue
from headrace.shared.broker.outage_log import OutageLog
from headrace.shared.errors import BrokerError
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane

STD = WorkQueue.job("m", Lane.STD)
RT = WorkQueue.job("m", Lane.RT)
IN_MEMORY = WorkQueue.prefill("m", Lane.RT)
TASKS = subjects.prefill("m", Lane.RT)
WATCHDOG_S = 60  # only when all is lost


def restored(broker: Broker) -> asyncio.Event:
    """Return what is set once the broker was away and is back."""
    event = asyncio.Event()

    async def on_reconnect() -> None:
        assert broker.is_connected
        event.set()

    broker.on_reconnect(on_reconnect)
    return event


async def test_a_kill_loses_no_stored_job_and_the_broker_layer_comes_back_whole(
    own_server: NatsServer,
) -> None:
    server = own_server
    settings = BrokerSettings(url=server.url)
    broker = await Broker.connect(settings, role="test", name="test")
    peer = await Broker.connect(settings, role="test", name="peer")
    await broker.declare_model("m")
    back, peer_back = restored(broker), restored(peer)
    heard: asyncio.Queue[Received] = asyncio.Queue()
    for subject in (subjects.frames("me"), subjects.ctl("me")):
        await broker.subscribe(subject, heard.put_nowait)
    for number in range(100):
        await broker.publish_durable(
            subjects.job("m", "acme", Lane.STD), b"%d" % number, message_id=f"j{number}"
        )
    await broker.publish_durable(TASKS, b"in memory", message_id="pf1")
    held = await broker.take(STD, wait_s=5)
    held_task = await broker.take(IN_MEMORY, wait_s=5)
    assert held is not None
    assert held_task is not None
    waiting = [asyncio.create_task(broker.take(RT, wait_s=600)) for _ in range(5)]
    await broker._control.flush()

    server.kill()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [None] * 5
    assert not broker.is_connected
    await server.restart()
    await asyncio.wait_for(asyncio.gather(back.wait(), peer_back.wait()), 20)

    # The job that was held is settled, the other 99 are there, and a retry is still recognized.
    await held.ack()
    rest = [await broker.take(STD, wait_s=5) for _ in range(99)]
    assert {int(d.payload) for d in rest if d is not None} == set(range(1, 100))
    assert not await broker.publish_durable(
        subjects.job("m", "acme", Lane.STD), b"0", message_id="j0"
    )
    # Memory streams are empty and work; an ack from before the kill hits nothing new.
    assert await broker.publish_durable(TASKS, b"after", message_id="pf2")
    after = await peer.take(IN_MEMORY, wait_s=5)
    assert after is not None
    await held_task.ack()
    await after.nak()
    again = await broker.take(IN_MEMORY, wait_s=5)
    assert again is not None
    assert again.payload == b"after"
    # Subscriptions are live, on both connections.
    await peer.publish(subjects.frames("me"), b"data")
    assert (await asyncio.wait_for(heard.get(), 10)).payload == b"data"
    await peer.publish(subjects.ctl("me"), b"control")
    assert (await asyncio.wait_for(heard.get(), 10)).payload == b"control"
    await broker.close()
    await peer.close()


async def test_what_is_published_while_the_broker_is_away_waits_for_it(
    own_server: NatsServer,
) -> None:
    server = own_server
    broker = await Broker.connect(
        BrokerSettings(url=server.url, publish_timeout_s=20), role="test", name="test"
    )
    await broker.declare_model("m")
    noticing = asyncio.create_task(broker.take(RT, wait_s=600))
    await asyncio.sleep(0)  # let it begin
    server.kill()
    assert await asyncio.wait_for(noticing, 10) is None
    assert not broker.is_connected
    jobs = [
        asyncio.create_task(
            broker.publish_durable(
                subjects.job("m", "acme", Lane.RT), b"%d" % n, message_id=f"j{n}"
            )
        )
        for n in range(20)
    ]
    chunk = asyncio.create_task(broker.publish(subjects.out("acme", "r1"), b"chunk"))
    taking = asyncio.create_task(broker.take(RT, wait_s=20))
    await server.restart()
    assert await asyncio.gather(*jobs) == [True] * 20
    await chunk
    assert await taking is not None
    assert [m.payload for m in await broker.replay(subjects.out("acme", "r1"))] == [b"chunk"]
    await broker.close()


async def test_takers_in_a_loop_come_through_a_graceful_stop_and_a_kill(
    own_server: NatsServer,
) -> None:
    server = own_server
    broker = await Broker.connect(BrokerSettings(url=server.url), role="test", name="test")
    await broker.declare_model("m")
    taken: asyncio.Queue[bytes] = asyncio.Queue()

    async def work() -> None:
        while True:
            if (delivery := await broker.take(STD, wait_s=600)) is not None:
                await delivery.ack()
                taken.put_nowait(delivery.payload)

    workers = [asyncio.create_task(work()) for _ in range(8)]
    for number in range(4):
        back = restored(broker)
        if number % 2:
            server.kill()
        else:
            await server.stop()
        await server.restart()
        await asyncio.wait_for(back.wait(), 20)
        for job in range(10):
            await broker.publish_durable(
                subjects.job("m", "acme", Lane.STD), b"%d" % job, message_id=f"{number}.{job}"
            )
        jobs = [await asyncio.wait_for(taken.get(), 10) for _ in range(10)]
        assert {int(job) for job in jobs} == set(range(10))
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await broker.close()


async def test_a_broker_that_stays_away_is_an_error_after_the_timeout(
    own_server: NatsServer,
) -> None:
    server = own_server
    broker = await Broker.connect(
        BrokerSettings(url=server.url, publish_timeout_s=0.3), role="test", name="test"
    )
    server.kill()
    with pytest.raises(BrokerError, match=r"broker\.publish_timeout_s"):
        await broker.publish_durable(subjects.job("m", "acme", Lane.RT), b"", message_id="1")
    with pytest.raises(BrokerError, match=r"not connected to nats://.* \(broker\.url\)"):
        await broker.publish(subjects.frames("x"), b"")
    assert await broker.take(RT, wait_s=0.1) is None
    await broker.close()


async def test_a_publish_whose_ack_was_lost_still_counts_as_stored(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await Broker.connect(BrokerSettings(url=own_server.url), role="test", name="test")
    request = broker._data.request
    lost: list[str] = []

    async def lose_the_first_ack(subject: str, *args: object, **kwargs: object) -> object:
        answer = await request(subject, *args, **kwargs)  # type: ignore[arg-type]
        if subject not in lost and not subject.startswith("$JS"):
            lost.append(subject)
            raise BrokerError("no answer")
        return answer

    monkeypatch.setattr(broker._data, "request", lose_the_first_ack)
    out, res = subjects.out("acme", "r1"), subjects.res("acme", "r1")
    assert await broker.publish_durable(out, b"mine", message_id="a") is True
    assert await broker.publish_durable(out, b"other", message_id="a") is False
    assert await broker.publish_durable(res, b"mine", message_id="b", expect_last=0)
    assert len(lost) == 2
    lost.clear()
    assert not await broker.publish_durable(res, b"x", message_id="c", expect_last=0)
    await broker.close()


async def test_a_publish_whose_ack_was_lost_counts_as_stored_when_it_is_worked_off_already(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await Broker.connect(BrokerSettings(url=own_server.url), role="test", name="test")
    await broker.declare_model("m")
    request = broker._data.request
    lost: list[str] = []

    async def lose_the_ack_until_it_is_worked_off(
        subject: str, *args: object, **kwargs: object
    ) -> object:
        answer = await request(subject, *args, **kwargs)  # type: ignore[arg-type]
        if subject not in lost and not subject.startswith("$JS"):
            lost.append(subject)
            delivery = await broker.take(RT, wait_s=20)
            assert delivery is not None
            await delivery.ack()
            raise BrokerError("no answer")
        return answer

    monkeypatch.setattr(broker._data, "request", lose_the_ack_until_it_is_worked_off)
    job = subjects.job("m", "acme", Lane.RT)
    assert await broker.publish_durable(job, b"mine", message_id="a") is True
    assert await broker.publish_durable(job, b"another", message_id="a") is False
    await broker.close()


async def test_processes_may_start_before_the_broker(
    own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    monkeypatch.setattr(OutageLog, "unreachable", lambda *_: failed.set())
    await own_server.stop()
    connecting = asyncio.create_task(
        Broker.connect(BrokerSettings(url=own_server.url), role="test", name="early")
    )
    async with asyncio.timeout(WATCHDOG_S):
        await failed.wait()
        assert not connecting.done()
        await own_server.restart()
        broker = await connecting
    assert broker.is_connected
    await broker.close()


async def test_a_wrong_password_ends_the_start_and_names_the_settings(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", password="right")
    await server.start()
    good = BrokerSettings(url=server.url, password="right")
    for role in ("gateway", "decode", "admin"):
        await (await Broker.connect(good, role=role, name="x")).close()
    bad = BrokerSettings(url=server.url, password="wrong")
    with pytest.raises(BrokerError, match=r"refuses user 'decode': set broker\.user"):
        await Broker.connect(bad, role="decode", name="x")
    with pytest.raises(BrokerError, match="refuses user"):
        await Broker.connect(BrokerSettings(url=server.url), role="decode", name="x")
    await server.stop()


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    config = tmp_path / "broken.conf"
    config.write_text("max_payload: [")
    with pytest.raises(BrokerError, match=r"broken\.conf"):
        await NatsServer(tmp_path / "nats", config=config).start()


async def test_a_subscribe_that_the_broker_leaves_in_the_middle_is_made_again(
    own_server: NatsServer,
) -> None:
    server = own_server
    broker = await Broker.connect(
        BrokerSettings(url=server.url, publish_timeout_s=30), role="test", name="test"
    )
    server.pause()  # the flush behind the subscription is not answered any more
    heard: asyncio.Queue[Received] = asyncio.Queue()
    subscribing = asyncio.create_task(broker.subscribe("hr.v1.kv.decode-1", heard.put_nowait))
    await asyncio.sleep(0)  # let it begin
    server.kill()
    await server.restart()
    await subscribing
    await broker.publish("hr.v1.kv.decode-1", b"heard")
    assert (await heard.get()).payload == b"heard"
    await broker.close()
