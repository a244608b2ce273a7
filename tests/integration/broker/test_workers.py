"""Who is there, and who has left."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received
from headrace.shared.messages import Heartbeat
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role
from headrace.shared.workers import CLOCK_BEATS, Beacon, WorkerTable

NEVER = 3600.0  # an interval in which no test sees a periodic beat


def heartbeat(model: str, instance: str = "d1", **more: object) -> Heartbeat:
    fields: dict[str, object] = {
        "role": Role.DECODE,
        "instance": f"{model}-{instance}",
        "model": model,
        "contract": "c1",
        "state": "ready",
        "slots": 4,
        "num_running": 0,
    }
    return Heartbeat(**{**fields, **more})  # type: ignore[arg-type]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def instances(table: WorkerTable, model: str) -> set[str]:
    return {beat.instance for beat in table.models().get(model, [])}


async def wait_for(table: WorkerTable, model: str, *expected: str) -> None:
    wanted = {f"{model}-{name}" for name in expected}
    await asyncio.wait_for(table.wait_for(lambda t: instances(t, model) == wanted), 10)


async def test_a_newcomer_learns_at_once_who_is_there(broker: Broker, slug: str) -> None:
    async with Beacon(broker, lambda: heartbeat(slug), NEVER):
        async with WorkerTable(broker, interval_s=NEVER) as table:
            await wait_for(table, slug, "d1")


async def test_a_worker_beats_periodically_without_being_asked(broker: Broker, slug: str) -> None:
    beats: asyncio.Queue[bytes] = asyncio.Queue()
    await broker.subscribe(subjects.heartbeats(slug), lambda r: beats.put_nowait(r.payload))
    async with Beacon(broker, lambda: heartbeat(slug), 0.01):
        for _ in range(5):
            await asyncio.wait_for(beats.get(), 10)


async def test_a_change_of_state_is_known_at_once(broker: Broker, slug: str) -> None:
    state = "starting"
    async with WorkerTable(broker, interval_s=NEVER) as table:
        async with Beacon(broker, lambda: heartbeat(slug, state=state), NEVER) as beacon:
            await wait_for(table, slug, "d1")
            assert table.ready(Role.DECODE, slug=slug) == []
            state = "ready"
            await beacon.beat()
            await asyncio.wait_for(
                table.wait_for(lambda t: bool(t.ready(Role.DECODE, slug=slug))), 10
            )
            state = "stopped"
            await beacon.beat()
            await wait_for(table, slug)


async def test_ready_workers_are_found_by_role_model_and_contract(
    broker: Broker, slug: str
) -> None:
    async with WorkerTable(broker, interval_s=NEVER) as table:
        for beat in (
            heartbeat(slug, "d1"),
            heartbeat(slug, "d2", contract="c2"),
            heartbeat(slug, "d3", state="draining"),
            heartbeat(slug, "p1", role=Role.PREFILL),
        ):
            await Beacon(broker, lambda beat=beat: beat).beat()  # type: ignore[misc]
        await wait_for(table, slug, "d1", "d2", "d3", "p1")

        def found(role: Role, **by: str) -> set[str]:
            return {
                b.instance.rpartition("-")[2] for b in table.ready(role, **by) if b.model == slug
            }

        assert found(Role.DECODE) == {"d1", "d2"}
        assert found(Role.DECODE, slug=slug, contract="c2") == {"d2"}
        assert found(Role.PREFILL) == {"p1"}
        assert found(Role.DECODE, slug="another") == set()


async def test_a_worker_that_falls_silent_leaves_after_three_intervals(
    broker: Broker, slug: str, clock: Clock
) -> None:
    async with WorkerTable(broker, interval_s=2.0, now=clock) as table:
        await Beacon(broker, lambda: heartbeat(slug)).beat()
        await wait_for(table, slug, "d1")
        clock.now += 6.0
        assert instances(table, slug) == {f"{slug}-d1"}
        clock.now += 0.1
        assert instances(table, slug) == set()


async def test_waiting_also_ends_when_a_worker_falls_silent(broker: Broker, slug: str) -> None:
    async with WorkerTable(broker, interval_s=0.05) as table:
        await Beacon(broker, lambda: heartbeat(slug)).beat()
        await wait_for(table, slug, "d1")
        await wait_for(table, slug)


async def test_a_lost_worker_is_out_at_once_until_it_beats_again(
    broker: Broker, slug: str, clock: Clock
) -> None:
    async with WorkerTable(broker, interval_s=NEVER, now=clock) as table:
        beacon = Beacon(broker, lambda: heartbeat(slug))
        await beacon.beat()
        await wait_for(table, slug, "d1")
        waiting = asyncio.create_task(table.wait_for(lambda t: instances(t, slug) == set()))
        await asyncio.sleep(0)  # let it begin
        table.forget(f"{slug}-d1")
        await waiting
        await beacon.beat()
        await wait_for(table, slug, "d1")


async def test_a_workers_clock_is_judged_by_the_quickest_of_its_last_beats(
    broker: Broker, slug: str
) -> None:
    name, here = f"{slug}-d1", Clock()
    table = WorkerTable(broker, interval_s=NEVER, clock=here)
    assert table.clock_offset(name) == 0.0

    def hear(sent: float, delay_s: float) -> None:
        beat = heartbeat(slug, sent=sent)
        here.now = sent - 60.0 + delay_s  # it is 60 s ahead
        subject = subjects.heartbeat(slug, Role.DECODE, name)
        table._on_heartbeat(Received(subject, wire.encode(beat), {}, ""))

    for number, delay_s in enumerate((0.5, 0.01, 3.0)):
        hear(200.0 + number, delay_s)
    assert table.clock_offset(name) == pytest.approx(-59.99)
    for number in range(CLOCK_BEATS):  # the quick one is too long ago
        hear(300.0 + number, 0.2)
    assert table.clock_offset(name) == pytest.approx(-59.8)


async def test_a_heartbeat_says_when_it_was_sent(broker: Broker, slug: str) -> None:
    async with WorkerTable(broker, interval_s=NEVER) as table:
        await Beacon(broker, lambda: heartbeat(slug)).beat()
        await wait_for(table, slug, "d1")
        assert 0.0 <= table.clock_offset(f"{slug}-d1") < 60.0
        assert table.models()[slug][0].sent > 0.0


async def test_a_heartbeat_that_is_none_or_anothers_is_refused(
    broker: Broker, slug: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerTable(broker, interval_s=NEVER) as table:
        subject = subjects.heartbeat(slug, Role.DECODE, "d9")
        await broker.publish(subject, b"\x00")
        await broker.publish(subject, wire.encode(heartbeat(slug, "someone-else")))
        await Beacon(broker, lambda: heartbeat(slug)).beat()
        await wait_for(table, slug, "d1")
    assert "not a heartbeat" in caplog.text
    assert "a heartbeat of" in caplog.text


async def test_the_table_fills_again_after_the_broker_was_away(
    own_server: NatsServer, clock: Clock
) -> None:
    settings = BrokerSettings(url=own_server.url)
    edge = await Broker.connect(settings, role="test", name="edge")
    worker = await Broker.connect(settings, role="test", name="worker")
    current = heartbeat("m")
    async with WorkerTable(edge, interval_s=2.0, now=clock) as table:
        async with Beacon(worker, lambda: current, NEVER):
            await wait_for(table, "m", "d1")
            own_server.kill()
            clock.now += 100
            current = msgspec.structs.replace(current, num_running=3)
            await own_server.restart()
            # The one from before the kill may still be under way, and counts as a word of life.
            await table.wait_for(lambda t: [beat.num_running for beat in t.workers()] == [3])
    await edge.close()
    await worker.close()


async def test_after_a_reconnect_a_worker_beats_and_a_table_calls_the_roll_unasked(
    own_server: NatsServer,
) -> None:
    broker = await Broker.connect(BrokerSettings(url=own_server.url), role="test", name="test")
    beats: asyncio.Queue[bytes] = asyncio.Queue()
    calls: asyncio.Queue[bytes] = asyncio.Queue()
    await broker.subscribe(subjects.heartbeats(), lambda r: beats.put_nowait(r.payload))
    async with Beacon(broker, lambda: heartbeat("m"), NEVER):
        await asyncio.wait_for(beats.get(), 10)
        own_server.kill()
        await own_server.restart()
        await asyncio.wait_for(beats.get(), 20)
    async with WorkerTable(broker, interval_s=NEVER):
        await broker.subscribe(subjects.roll_call(), lambda r: calls.put_nowait(r.payload))
        own_server.kill()
        await own_server.restart()
        await asyncio.wait_for(calls.get(), 20)
    await broker.close()
