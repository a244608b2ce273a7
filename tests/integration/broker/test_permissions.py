"""The deployment's `nats-server.conf`: each role can do its part, and not another's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.cli.dlq import run as dlq
from headrace.cli.main import build_parser
from headrace.cli.top.frame import Rates, frame
from headrace.cli.top.run import Eye
from headrace.shared import nats_server as nats_server_module
from headrace.shared import subjects
from headrace.shared.batches import FileRecord
from headrace.shared.broker import Broker, DeniedError, Received, WorkQueue
from headrace.shared.broker.jetstream import api
from headrace.shared.errors import BrokerError
from headrace.shared.files import BrokerFiles
from headrace.shared.messages import Heartbeat
from headrace.shared.pulse import answering_pings, ping_over
from headrace.shared.queue_ages import QueueAges
from headrace.shared.queue_look import STAGES
from headrace.shared.records import Records
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role, pool
from headrace.shared.workers import Beacon, WorkerTable

from ...conftest import Serve
from . import deployed

Brokers = dict[str, Broker]
TICK_S = 0.02
WATCHDOG_S = 60


@pytest_asyncio.fixture
async def brokers(serve: Serve, tmp_path: Path) -> AsyncIterator[Brokers]:
    """A broker of every role, and an admin's, on a server with the deployment's file."""
    server = await serve(deployed.server(tmp_path, deployed.CONFIG.read_text()))
    found = {
        name: await Broker.connect(
            BrokerSettings(url=server.url, password=f"pw-{name}", publish_timeout_s=5),
            role=name,
            name="1",
        )
        for name in [*map(str, Role), "admin"]
    }
    yield found
    await asyncio.gather(*(broker.close() for broker in found.values()))


async def take(broker: Broker, queue: WorkQueue) -> None:
    delivery = await broker.take(queue, wait_s=5)
    assert delivery is not None
    await delivery.in_progress()
    await delivery.nak()
    delivery = await broker.take(queue, wait_s=5)
    assert delivery is not None
    await delivery.ack()


async def test_only_an_operator_says_how_much_a_role_logs(brokers: Brokers) -> None:
    heard: asyncio.Queue[Received] = asyncio.Queue()
    for role in Role:
        await brokers[role].subscribe(subjects.log_level(role), heard.put_nowait)
    for role in Role:
        with pytest.raises(DeniedError):
            await brokers[role].request(subjects.log_level(role), b"", timeout_s=5)
        await brokers["admin"].publish(subjects.log_level(role), b"debug")
        received = await asyncio.wait_for(heard.get(), 5)
        assert (received.subject, received.payload) == (subjects.log_level(role), b"debug")
    assert heard.empty()


async def test_a_request_goes_all_the_way_through_with_each_roles_own_user(
    brokers: Brokers,
) -> None:
    gateway, render, prefill, decode, derender, _ = (brokers[role] for role in Role)
    for broker in (render, prefill, decode):
        await broker.declare_model("m")
    heard: asyncio.Queue[Received] = asyncio.Queue()
    out, res = subjects.out("acme", "r1"), subjects.res("acme", "r1")
    await gateway.subscribe(out, heard.put_nowait)
    for lane in Lane:
        await gateway.publish_durable(
            subjects.req("acme", "m", lane), bytes(5_000_000), message_id=f"r1.{lane}"
        )
        await take(render, WorkQueue.req("m", lane))
        await render.publish_durable(
            subjects.job("m", "acme", lane), b"job", message_id=f"r1.job.{lane}"
        )
        await take(decode, WorkQueue.job("m", lane))
    answers: set[asyncio.Task[None]] = set()

    def answer(received: Received) -> None:
        answers.add(asyncio.create_task(derender.respond(received, b"opened")))

    await derender.subscribe(subjects.derender_open("m"), answer, queue="derender")
    assert await decode.request(subjects.derender_open("m"), b"open", timeout_s=5) == b"opened"
    await decode.subscribe(subjects.kv("d1"), heard.put_nowait)
    await decode.subscribe(subjects.ctl("d1"), heard.put_nowait)
    await decode.publish_durable(subjects.prefill("m", Lane.RT), b"task", message_id="r1.pf")
    await take(prefill, WorkQueue.prefill("m", Lane.RT))
    own = WorkQueue.prefill_worker("m", "prefill-1")
    await prefill.declare_queue(own)
    await decode.publish_durable(
        subjects.prefill_worker("m", "prefill-1"), b"task", message_id="r1.pf.2"
    )
    await take(prefill, own)
    await prefill.publish(subjects.kv("d1"), b"handoff")
    assert (await asyncio.wait_for(heard.get(), 5)).payload == b"handoff"
    await derender.subscribe(subjects.frames("x1"), heard.put_nowait)
    await decode.publish(subjects.frames("x1"), b"frame")
    assert (await asyncio.wait_for(heard.get(), 5)).payload == b"frame"
    await derender.publish(subjects.ctl("d1"), b"credit")
    assert (await asyncio.wait_for(heard.get(), 5)).payload == b"credit"
    await derender.publish_durable(out, b"end", message_id="r1.end")
    assert (await asyncio.wait_for(heard.get(), 5)).payload == b"end"
    assert [m.payload for m in await gateway.replay(out)] == [b"end"]
    await derender.publish_durable(res, b"end", message_id="r1.res", expect_last=0)
    last = await gateway.last(res)
    assert last is not None
    assert last.payload == b"end"
    for broker in (render, prefill, decode):
        await broker.subscribe(subjects.cancel_all(), heard.put_nowait)
    await gateway.publish(subjects.cancel("acme", "r1"), b"cancel")
    assert {(await asyncio.wait_for(heard.get(), 5)).payload for _ in range(3)} == {b"cancel"}
    await brokers["admin"].subscribe(subjects.reply("acme", "t1"), heard.put_nowait)
    for broker in (render, decode, derender):
        await broker.publish(subjects.reply("acme", "t1"), b"reply")
        assert (await asyncio.wait_for(heard.get(), 5)).payload == b"reply"
    for role in (Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER):
        await brokers[role].publish_durable(
            subjects.dead_letter(role, "m"), b"dead", message_id=f"dlq.{role}"
        )


async def test_derender_gives_back_the_job_of_a_lost_decode_worker_and_the_next_one_tells_both(
    brokers: Brokers,
) -> None:
    render, decode, derender = (brokers[role] for role in (Role.RENDER, Role.DECODE, Role.DERENDER))
    await decode.declare_model("m")
    await render.publish_durable(subjects.job("m", "acme", Lane.RT), b"job", message_id="r1.job")
    taken = await decode.take(WorkQueue.job("m", Lane.RT), wait_s=5)
    assert taken is not None
    await derender.hand_back(taken.reply)
    again = await decode.take(WorkQueue.job("m", Lane.RT), wait_s=5)
    assert again is not None
    assert (again.payload, again.num_delivered) == (b"job", 2)
    heard: asyncio.Queue[Received] = asyncio.Queue()
    for broker in (decode, derender):
        await broker.subscribe(subjects.takeover_all(), heard.put_nowait)
    await decode.publish(subjects.takeover("acme", "r1"), b"takeover")
    assert {(await asyncio.wait_for(heard.get(), 5)).payload for _ in range(2)} == {b"takeover"}
    with pytest.raises(BrokerError, match="is no ack subject of a job"):
        await derender.hand_back(subjects.ctl("d1"))


async def test_a_gateway_may_ask_render_and_derender(brokers: Brokers) -> None:
    answers: set[asyncio.Task[None]] = set()
    for role, subject in (
        (Role.RENDER, subjects.render_ask("m")),
        (Role.DERENDER, subjects.derender_ask("m")),
    ):
        worker = brokers[role]

        def answer(received: Received, worker: Broker = worker) -> None:
            answers.add(asyncio.create_task(worker.respond(received, bytes(5_000_000))))

        await worker.subscribe(subject, answer, queue=role)
        got = await brokers[Role.GATEWAY].request(subject, bytes(5_000_000), timeout_s=5)
        assert got == bytes(5_000_000)


async def test_decode_notes_what_prefill_tells_it(brokers: Brokers) -> None:
    prefill, decode = brokers[Role.PREFILL], brokers[Role.DECODE]
    answers: set[asyncio.Task[None]] = set()

    def note(received: Received) -> None:
        answers.add(asyncio.create_task(decode.respond(received, b"noted")))

    await decode.subscribe(subjects.kv("d1"), note)
    for size in (1, 5_000_000):
        assert await prefill.request(subjects.kv("d1"), bytes(size), timeout_s=5) == b"noted"


async def test_every_worker_may_beat_and_every_role_may_listen(brokers: Brokers) -> None:
    beacons = [
        Beacon(brokers[role], lambda role=role: heartbeat(role))  # type: ignore[misc]
        for role in Role
        if role is not Role.GATEWAY
    ]
    for beacon in beacons:
        await beacon.start()
    for role in Role:
        async with WorkerTable(brokers[role]) as table:
            await asyncio.wait_for(table.wait_for(lambda t: len(t.workers()) == len(beacons)), 10)
    for beacon in beacons:
        await beacon.stop()


async def test_every_process_may_answer_pings_and_who_depends_on_one_may_send_them(
    brokers: Brokers,
) -> None:
    async with AsyncExitStack() as answering:
        for role in Role:
            await answering.enter_async_context(answering_pings(brokers[role], f"{role}-1"))
        for asker in (Role.PREFILL, Role.DECODE, Role.DERENDER):
            for role in Role:
                await ping_over(brokers[asker])(f"{role}-1")


def heartbeat(role: Role) -> Heartbeat:
    return Heartbeat(
        role=role,
        instance=f"{role}-1",
        model="m",
        contract="",
        state="ready",
        slots=1,
        num_running=0,
    )


@pytest.mark.parametrize(
    ("role", "subject"),
    [
        (Role.GATEWAY, subjects.job("m", "acme", Lane.RT)),
        (Role.GATEWAY, subjects.out("acme", "r1")),
        (Role.RENDER, subjects.req("acme", "m", Lane.RT)),
        (Role.PREFILL, subjects.res("acme", "r1")),
        (Role.PREFILL, subjects.dead_letter(Role.DECODE, "m")),
        (Role.DECODE, subjects.job("m", "acme", Lane.RT)),
        (Role.DERENDER, subjects.prefill("m", Lane.RT)),
    ],
)
async def test_a_role_may_not_publish_what_is_anothers(
    brokers: Brokers, role: Role, subject: str
) -> None:
    with pytest.raises(
        BrokerError, match=rf"{role} 1 data may not publish to {re.escape(subject)}"
    ):
        await brokers[role].publish_durable(subject, b"", message_id="x")


async def test_a_role_may_not_take_anothers_work(brokers: Brokers) -> None:
    with pytest.raises(BrokerError, match=r"may not publish to .*MSG\.NEXT\.HR_JOB"):
        await brokers[Role.RENDER].take(WorkQueue.job("m", Lane.RT), wait_s=5)


@pytest.mark.parametrize(
    ("role", "subject", "queue"),
    [
        (Role.GATEWAY, "_INBOX_decode.>", ""),
        (Role.PREFILL, subjects.out("acme", "r1"), ""),
        (Role.RENDER, "hr.v1.>", ""),
        (Role.DERENDER, subjects.derender_open("m"), ""),
        (Role.DERENDER, subjects.derender_open("m"), "spies"),
        (Role.DERENDER, subjects.derender_ask("m"), "spies"),
        (Role.RENDER, subjects.render_ask("m"), ""),
        (Role.DERENDER, subjects.render_ask("m"), "render"),
    ],
)
async def test_a_role_may_not_listen_to_what_is_anothers(
    brokers: Brokers, role: Role, subject: str, queue: str
) -> None:
    with pytest.raises(BrokerError, match="may not subscribe"):
        await brokers[role].subscribe(subject, lambda _: None, queue=queue)


async def test_what_takes_from_a_queue_may_note_and_read_what_came_back(brokers: Brokers) -> None:
    for number, role in enumerate((Role.RENDER, Role.PREFILL, Role.DECODE)):
        subject = subjects.returned("HR_JOB", number)
        await brokers[role].publish_durable(subject, b"1", message_id=f"returned.{number}")
        noted = await brokers[role].last(subject)
        assert noted is not None
        assert noted.payload == b"1"


async def test_every_role_may_read_the_cancels_of_before(brokers: Brokers) -> None:
    subject = subjects.cancel("acme", "r1")
    await brokers[Role.GATEWAY].publish_durable(subject, b"cancel", message_id="cancel")
    for role in Role:
        kept = await brokers[role].stored_on(subjects.cancel_all())
        assert [received.payload for received in kept] == [b"cancel"]


async def test_a_gateway_and_batch_keep_files_and_batches(brokers: Brokers) -> None:
    gateway, batch = brokers[Role.GATEWAY], brokers[Role.BATCH]
    record = FileRecord(id="f", filename="f", purpose="batch", created_at=1)
    queue = WorkQueue.batch()
    await batch.declare_queue(queue)
    for number, broker in enumerate((gateway, batch)):
        records, files = Records(broker), BrokerFiles(broker)
        revision = await records.put("file", "acme", "f", record, expect=0)
        assert await records.get("file", "acme", "f", FileRecord) == (record, revision)
        assert len((await records.list("file", "acme", FileRecord)).records) == 1
        await files.append_part("acme", "f", 0, b"line")
        assert [part.data async for part in files.parts("acme", "f", num_parts=1)] == [b"line"]
        await files.delete("acme", "f")
        await records.delete("file", "acme", "f", expect=revision)
        await broker.publish_durable(
            subjects.batch("acme", f"b{number}"), b"", message_id=f"b{number}", expect_last=0
        )
        await take(batch, queue)
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    await Records(batch).watch("batch", lambda *named: heard.put_nowait(named))
    await Records(gateway).put("batch", "acme", "b1", record, expect=0)
    assert await asyncio.wait_for(heard.get(), 5) == ("acme", "b1")


async def test_one_gateway_hears_of_a_responses_start_and_of_nothing_else(
    brokers: Brokers,
) -> None:
    gateway, decode = brokers[Role.GATEWAY], brokers[Role.DECODE]
    heard: asyncio.Queue[Received] = asyncio.Queue()
    started = subjects.event_change_filter("response", "started")
    await gateway.subscribe(started, heard.put_nowait, queue="gateway")
    await decode.publish(subjects.event("acme", "response", "started"), b"{}")
    assert (await asyncio.wait_for(heard.get(), 5)).payload == b"{}"
    for subject, queue in ((started, ""), (subjects.event_filter("request"), "gateway")):
        with pytest.raises(DeniedError):
            await gateway.subscribe(subject, heard.put_nowait, queue=queue)


async def test_a_stage_reads_and_changes_no_files_and_batches(brokers: Brokers) -> None:
    record = FileRecord(id="f", filename="f", purpose="batch", created_at=1)
    for role in (Role.RENDER, Role.PREFILL, Role.DECODE, Role.DERENDER):
        records, files = Records(brokers[role]), BrokerFiles(brokers[role])
        for call in (
            records.put("file", "acme", "f", record, expect=0),
            records.get("file", "acme", "f", FileRecord),
            records.list("file", "acme", FileRecord),
            files.append_part("acme", "f", 0, b"line"),
            anext(files.parts("acme", "f")),
            files.delete("acme", "f"),
        ):
            with pytest.raises(DeniedError):
                await call
    with pytest.raises(DeniedError):
        await Records(brokers[Role.BATCH]).put("resp", "acme", "r", record, expect=0)


async def test_only_an_admin_changes_a_stream(brokers: Brokers) -> None:
    for name, allowed in (("gateway", False), ("admin", True)):
        call = api(brokers[name]._control, "STREAM.PURGE.HR_REQ")
        if allowed:
            assert (await call)["success"]
        else:
            with pytest.raises(BrokerError, match="may not publish"):
                await call


async def test_only_an_admin_reads_and_takes_out_dead_letters(brokers: Brokers) -> None:
    letters = subjects.dead_letter(Role.DECODE, "m")
    for number in (1, 2):
        await brokers[Role.DECODE].publish_durable(letters, b"dead", message_id=f"{number}")
    for role in Role:
        admin = brokers[role].admin
        for call in (
            admin.message("HR_DLQ", 1),
            admin.delete("HR_DLQ", 1),
            admin.purge("HR_DLQ", letters, up_to=1),
        ):
            with pytest.raises(DeniedError):
                await call
        with pytest.raises(DeniedError):
            [kept async for kept in admin.messages("HR_DLQ", letters)]
    options = build_parser().parse_args(["dlq", "list"])
    gateway = msgspec.structs.replace(brokers[Role.GATEWAY]._connections._settings, user="gateway")
    with pytest.raises(BrokerError, match="only the broker's user admin may"):
        await dlq.act(options, gateway)
    # Without a user's name, a password is the admin's.
    assert await dlq.act(options, brokers["admin"]._connections._settings) == 0
    admin = brokers["admin"].admin
    assert [kept.sequence async for kept in admin.messages("HR_DLQ", letters)] == [1, 2]
    assert await admin.delete("HR_DLQ", 1)
    await admin.purge("HR_DLQ", letters, up_to=2)
    assert await admin.num_messages("HR_DLQ") == 0


async def test_a_gateway_sees_how_long_queues_are_and_not_what_waits_in_them(
    brokers: Brokers,
) -> None:
    await brokers[Role.RENDER].declare_model("m")
    request = subjects.req("acme", "m", Lane.STD)
    await brokers[Role.GATEWAY].publish_durable(request, b"{}", message_id="r1")
    for name in (Role.GATEWAY, "admin"):
        queues = {
            queue.filter_subject: queue for queue in await brokers[name].admin.queues("HR_REQ")
        }
        assert queues[subjects.req_filter("m", Lane.STD)].num_waiting == 1
        for stream in ("HR_REQ_RT", "HR_JOB_RT", "HR_JOB", "HR_PF"):
            await brokers[name].admin.queues(stream)
    with pytest.raises(DeniedError):
        await brokers[Role.GATEWAY].admin.first("HR_REQ", request)
    with pytest.raises(DeniedError):
        await brokers[Role.DECODE].admin.queues("HR_REQ")
    looks = {}
    for name in (Role.GATEWAY, "admin", Role.DECODE):
        async with WorkerTable(brokers[name]) as table:
            looks[name] = frame(await Eye(brokers[name], table).look(), Rates())
    for name in (Role.GATEWAY, "admin"):
        (row,) = [row for row in looks[name].queues or () if row.num_waiting]
        assert (row.model, row.lane, row.num_waiting) == ("m", "std", 1)
        assert (row.oldest_s is None) == (name == Role.GATEWAY)  # no worker is there to tell it
    assert (looks[Role.GATEWAY].running, looks[Role.GATEWAY].num_dead_letters) == (None, None)
    assert (looks["admin"].running, looks["admin"].num_dead_letters) == ([], 0)
    assert looks[Role.DECODE].queues is None


async def test_a_gateway_is_told_by_workers_how_long_their_work_waits(brokers: Brokers) -> None:
    published = {
        Role.RENDER: (Role.GATEWAY, subjects.req("acme", "m", Lane.STD)),
        Role.DECODE: (Role.RENDER, subjects.job(pool("m", ""), "acme", Lane.STD)),
        Role.PREFILL: (Role.DECODE, subjects.prefill(pool("m", ""), Lane.STD)),
    }
    for role, (publisher, subject) in published.items():
        await brokers[role].declare_model("m", pool("m", ""))
        await brokers[publisher].publish_durable(subject, b"{}", message_id=f"for.{role}")
    async with AsyncExitStack() as stack, asyncio.timeout(WATCHDOG_S):
        for role in published:
            table = await stack.enter_async_context(WorkerTable(brokers[role]))
            ages = QueueAges(brokers[role], table, f"{role}-1", role, slug="m", contract="")
            stack.enter_context(running(ages.run(TICK_S)))
            beat = partial(told, role, ages)
            await stack.enter_async_context(Beacon(brokers[role], beat, TICK_S))
        seen = await stack.enter_async_context(WorkerTable(brokers[Role.GATEWAY]))
        await seen.wait_for(lambda t: sum(bool(b.oldest_wait_s) for b in t.workers()) == 3)
        look = frame(await Eye(brokers[Role.GATEWAY], seen).look(), Rates())
    waiting = [row for row in look.queues or () if row.num_waiting]
    assert [(row.stage, row.lane) for row in waiting] == [(role, "std") for role in STAGES.values()]
    assert all(row.oldest_s is not None for row in waiting)


def told(role: Role, ages: QueueAges) -> Heartbeat:
    return msgspec.structs.replace(heartbeat(role), oldest_wait_s=ages.waits_s)


@contextmanager
def running(coroutine: Coroutine[Any, Any, None]) -> Iterator[None]:
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("role", "stream"),
    [(Role.RENDER, "HR_JOB"), (Role.DECODE, "HR_REQ"), (Role.PREFILL, "HR_JOB_RT")],
)
async def test_a_role_may_not_look_at_anothers_queue(
    brokers: Brokers, role: Role, stream: str
) -> None:
    admin = brokers[role].admin
    for call in (admin.queue(stream, "m_rt"), admin.first(stream, "hr.v1.>")):
        with pytest.raises(DeniedError):
            await call


def test_the_deployments_limits_are_those_of_the_built_in_server() -> None:
    text = deployed.CONFIG.read_text()
    built_in = Path(nats_server_module.__file__).with_name("nats_limits.conf").read_text()
    settings = [line for line in built_in.splitlines() if line and not line.startswith("#")]
    assert len(settings) == 7
    settings += [
        line
        for line in nats_server_module._JETSTREAM.format(store_dir="x").splitlines()
        if line.startswith("  ") and "store_dir" not in line
    ]
    assert len(settings) == 12
    for line in settings:
        assert line in text
