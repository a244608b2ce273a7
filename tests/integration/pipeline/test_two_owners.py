"""A decode worker whose job was given to another one while it lives: one answer, and the older owner lets go."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from headrace.decode import elsewhere, service
from headrace.decode.elsewhere import Elsewhere
from headrace.decode.ownership import Ownership
from headrace.decode.service import DecodeService
from headrace.decode.takeover import Succession
from headrace.shared import subjects, token_ids, wire
from headrace.shared.broker import Delivery, Received, WorkQueue
from headrace.shared.messages import Chunk, Job, Prompt, Takeover, Terminal
from headrace.shared.owners import Owners
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import Worker

from .conftest import Engines, Pipeline, keep_silent, shorten_ack_wait
from .test_faults import completion, pool_of, slow, sse, text_of
from .test_flow import expected_text
from .test_takeover import until_settled

NUM_IDS = 800
LONG = {"max_tokens": NUM_IDS, "ignore_eos": True, "stream": True}
WATCHDOG_S = 60.0

HASTY_WORKER = """
import dataclasses, sys
from headrace.cli.main import main
from headrace.shared.broker import WorkQueue

job = WorkQueue.job.__func__
WorkQueue.job = classmethod(lambda cls, *of: dataclasses.replace(job(cls, *of), ack_wait_s=1.0))
main(["serve", "decode", "--engine", "fake", *sys.argv[1:]])
"""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker gives a job whose worker is silent to another one soon."""
    shorten_ack_wait(monkeypatch, 1.0)


@pytest.fixture(autouse=True)
def deaf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears who asks whether it has a job: as if it were stopped, or cut off."""
    if "asked" not in request.fixturenames:
        make_deaf(monkeypatch)


def make_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(elsewhere, "RECONNECT_GRACE_S", 0.0)  # nobody is on the way back
    monkeypatch.setattr(elsewhere, "MEET_S", 0.0)
    monkeypatch.setattr(Elsewhere, "_on_question", lambda self, received: None)


def slow_with_one_slot(pipeline: Pipeline) -> None:
    """So that a job that comes again can't come to the worker that has it."""
    slow(pipeline)
    decode = msgspec.structs.replace(pipeline.settings.decode, slots=1)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=decode)


class Reader:
    """All that was published of one answer, in the order of its stream."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.request_id = f"r-{pipeline.settings.model.served_name}"
        self._pipeline = pipeline
        self._came = asyncio.Event()
        self.epochs: set[int] = set()

    async def listen(self) -> None:
        await self._pipeline.broker.subscribe(self._subject, self._on_message)

    @property
    def _subject(self) -> str:
        return subjects.out("default", self.request_id)

    def _on_message(self, received: Received) -> None:
        message = wire.decode(received.payload, Chunk, Terminal, Takeover)
        if isinstance(message, Chunk):
            self.epochs.add(message.epoch)
        self._came.set()

    async def until_epoch(self, epoch: int) -> None:
        """Return once a part of this owner's answer was published."""
        while epoch not in self.epochs:
            await self._came.wait()
            self._came.clear()

    async def counting_terminals(self) -> list[Terminal]:
        captured = await self._pipeline.broker.replay(self._subject)
        messages = [wire.decode(r.payload, Chunk, Terminal, Takeover) for r in captured]
        owners = Owners()
        for message in messages:
            if isinstance(message, Takeover):
                owners.take_over(message)
        return [m for m in messages if isinstance(m, Terminal) and not owners.is_void(m)]


async def until_idle(pipeline: Pipeline) -> None:
    """Return once no worker has anything."""
    await pipeline.table.wait_for(
        lambda table: all(
            beat.num_running == 0
            for role in (Role.DECODE, Role.DERENDER)
            for beat in table.ready(role)
        )
    )


@pytest.mark.parametrize("heard", ["by all", "by derender alone"])
async def test_an_owner_whose_job_is_taken_over_aborts_it_and_says_nothing_more(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    heard: str,
) -> None:
    keep_silent(monkeypatch, num_deliveries=1)
    if heard != "by all":
        monkeypatch.setattr(Ownership, "_on_takeover", lambda self, received: None)
    slow_with_one_slot(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    await pipeline.start(Role.DECODE)
    reader = Reader(pipeline)
    await reader.listen()
    request = completion(pipeline, "two owners") | LONG
    headers = {"X-Request-Id": reader.request_id}
    text = ""
    async with (
        client.stream("POST", "/v1/completions", json=request, headers=headers) as response,
        asyncio.timeout(WATCHDOG_S),
    ):
        events = sse(response.aiter_lines())
        text += text_of(await anext(events))
        await pipeline.start(Role.DECODE)
        await reader.until_epoch(2)
        await engines.decode[0].wait_until(lambda stats: stats.num_running == 0)
        assert engines.decode[1].stats().num_running == 1
        async for event in events:
            text += text_of(event)
    assert text == expected_text("two owners", NUM_IDS, ignore_eos=True)
    (terminal,) = await reader.counting_terminals()
    assert terminal.status == "ok"
    assert terminal.epoch >= 2  # more, where this process was slower than the hasty broker
    await until_idle(pipeline)


async def job_of_a_lost_owner(pipeline: Pipeline, reader: Reader, **more: Any) -> Terminal:
    """Return the end of a job that comes to a decode worker for the second time."""
    decode = pipeline.heartbeat(Role.DECODE)
    job = Job(
        request_id=reader.request_id,
        tenant="default",
        model=decode.model,
        endpoint="completions",
        created=0,
        published=time.time(),
        deadline=time.time() + WATCHDOG_S,
        contract=decode.contract,
        body=b"{}",
        stream=False,
        prompts=(Prompt(token_ids=token_ids.pack([97]), sampling_params=b"\x80"),),
        **{"lane": Lane.RT, **more},
    )
    subject = subjects.job(pool_of(pipeline), job.tenant, job.lane)
    await pipeline.broker.publish_durable(
        subject, wire.encode(job), message_id=f"{job.request_id}.job"
    )
    ended: asyncio.Future[Terminal] = asyncio.get_running_loop().create_future()

    def on_message(received: Received) -> None:
        message = wire.decode(received.payload, Chunk, Terminal, Takeover)
        if isinstance(message, Terminal) and not ended.done():
            ended.set_result(message)

    await pipeline.broker.subscribe(subjects.out("default", reader.request_id), on_message)
    return await ended


@pytest.fixture
def second_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job has had an owner before."""
    init = Delivery.__init__

    def again(self: Delivery, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self.num_delivered += 1

    monkeypatch.setattr(Delivery, "__init__", again)


@pytest.mark.usefixtures("second_delivery")
async def test_what_comes_between_reading_and_taking_over_is_read_too(
    pipeline: Pipeline, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older owner's end is stored at the last moment: the new owner finds it, and generates nothing."""
    reader, seen, num_reads = Reader(pipeline), Succession._seen, itertools.count(1)
    end = Terminal(
        request_id=reader.request_id, seq=0, status="ok", http_status=200, body=b"{}", epoch=1
    )

    async def seen_too_early(self: Succession, job: Job) -> Any:
        found = await seen(self, job)
        if next(num_reads) == 2:
            subject = subjects.out("default", reader.request_id)
            await pipeline.broker.publish_durable(subject, wire.encode(end), message_id="end")
        return found

    monkeypatch.setattr(Succession, "_seen", seen_too_early)
    await pipeline.start(Role.DERENDER, Role.DECODE)
    async with asyncio.timeout(WATCHDOG_S):
        assert await job_of_a_lost_owner(pipeline, reader) == end
        await until_settled(pipeline, WorkQueue.job(pool_of(pipeline), Lane.RT))
    assert await reader.counting_terminals() == [end]
    assert engines.decode[0].stats().num_steps == 0


@pytest.mark.usefixtures("second_delivery")
async def test_the_end_of_an_older_owner_keeps_no_later_one_from_being_stored(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, both = Worker.publish_terminal, asyncio.Event()

    async def after_a_late_one(
        self: Worker, tenant: str, lane: Lane, terminal: Terminal, **more: Any
    ) -> None:
        late = msgspec.structs.replace(terminal, epoch=1, body=b"", seq=5)
        await publish(self, tenant, lane, late, **more)
        await publish(self, tenant, lane, terminal, **more)
        both.set()

    monkeypatch.setattr(Worker, "publish_terminal", after_a_late_one)
    await pipeline.start(Role.DERENDER, Role.DECODE)
    reader = Reader(pipeline)
    async with asyncio.timeout(WATCHDOG_S):
        await job_of_a_lost_owner(pipeline, reader)
        await both.wait()
    (terminal,) = await reader.counting_terminals()
    assert (terminal.status, terminal.epoch, bool(terminal.body)) == ("ok", 2, True)


@pytest.mark.usefixtures("second_delivery")
async def test_a_kept_result_ends_the_answer_whoever_took_over_since(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older owner's failure was kept while the new one began: that is the result, and `out` says so."""
    reader, seen = Reader(pipeline), Succession._seen
    kept = Terminal(
        request_id=reader.request_id, seq=0, status="error", http_status=500, body=b"{}", epoch=1
    )

    async def then_kept(self: Succession, job: Job) -> Any:
        subject = subjects.res("default", reader.request_id)
        await pipeline.broker.publish_durable(subject, wire.encode(kept), message_id="kept")
        return await seen(self, job)

    monkeypatch.setattr(Succession, "_seen", then_kept)
    await pipeline.start(Role.DERENDER, Role.DECODE)
    async with asyncio.timeout(WATCHDOG_S):
        await job_of_a_lost_owner(pipeline, reader, lane=Lane.STD)
        await until_idle(pipeline)
    (terminal,) = await reader.counting_terminals()
    assert (terminal.status, terminal.epoch) == ("error", 0)


@pytest.fixture
async def stopped_worker(pipeline: Pipeline) -> AsyncIterator[Any]:
    """Starts a decode worker as a process of its own, to be stopped and woken."""
    started: list[asyncio.subprocess.Process] = []

    async def start() -> asyncio.subprocess.Process:
        settings = pipeline.settings
        given = {
            "broker.url": settings.broker.url,
            "model.served_name": settings.model.served_name,
            "decode.local_prefill_threshold": "0",
            "decode.slots": "1",
            "fake.step_s": f"{settings.fake.step_s}",
            "fake.prefill_s_per_1k": "0",
        }
        flags = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HASTY_WORKER, *flags, stderr=asyncio.subprocess.DEVNULL
        )
        started.append(process)
        await pipeline.table.wait_for(lambda table: bool(table.ready(Role.DECODE)))
        return process

    yield start
    for process in started:
        process.kill()
        await process.wait()


async def test_a_worker_that_was_stopped_and_wakes_up_lets_go_of_what_was_taken_over(
    pipeline: Pipeline, client: httpx.AsyncClient, stopped_worker: Any
) -> None:
    slow_with_one_slot(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    async with asyncio.timeout(WATCHDOG_S):
        process = await stopped_worker()
        reader = Reader(pipeline)
        await reader.listen()
        request = completion(pipeline, "stopped") | LONG
        headers = {"X-Request-Id": reader.request_id}
        text = ""
        async with client.stream(
            "POST", "/v1/completions", json=request, headers=headers
        ) as response:
            events = sse(response.aiter_lines())
            text += text_of(await anext(events))
            process.send_signal(signal.SIGSTOP)
            await pipeline.start(Role.DECODE)
            await reader.until_epoch(2)
            process.send_signal(signal.SIGCONT)
            async for event in events:
                text += text_of(event)
        assert text == expected_text("stopped", NUM_IDS, ignore_eos=True)
        (terminal,) = await reader.counting_terminals()
        assert terminal.status == "ok"
        assert terminal.epoch >= 2  # more, where this process was slower than the hasty broker
        await until_idle(pipeline)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bool]:
    """What each worker is told that asks whether another one has its job."""
    told, has = asyncio.Queue[bool](), Elsewhere.has

    async def noted(self: Elsewhere, job: Job) -> bool:
        found = await has(self, job)
        told.put_nowait(found)
        return found

    monkeypatch.setattr(Elsewhere, "has", noted)
    return told


@pytest.mark.parametrize("owner", ["answers", "is deaf", "goes in between"])
async def test_a_job_that_the_broker_forgot_to_have_given_out_has_one_owner(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    asked: asyncio.Queue[bool],
    owner: str,
) -> None:
    """Two first owners would both be heard, and each cuts the answer in its own way."""
    slow_with_one_slot(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    if owner == "is deaf":
        make_deaf(monkeypatch)
    (first,) = await pipeline.start(Role.DECODE)
    monkeypatch.setattr(service, "ELSEWHERE_PAUSE_S", 0.05)
    reader, jobs = Reader(pipeline), asyncio.Queue[Received]()
    await reader.listen()
    await pipeline.broker.subscribe(f"hr.v1.job.{pool_of(pipeline)}.>", jobs.put_nowait)
    request = completion(pipeline, "forgotten") | LONG
    headers = {"X-Request-Id": reader.request_id}
    async with (
        asyncio.timeout(WATCHDOG_S),
        client.stream("POST", "/v1/completions", json=request, headers=headers) as response,
    ):
        events = sse(response.aiter_lines())
        text = text_of(await anext(events))
        job = await jobs.get()
        await pipeline.start(Role.DECODE)
        # As after a crash: the message is in its queue again, and was delivered to nobody.
        message_id = f"{reader.request_id}.again"
        await pipeline.broker.publish_durable(job.subject, job.payload, message_id=message_id)
        assert await asked.get() is (owner != "is deaf")
        if owner == "goes in between":
            await first.kill()
        if owner != "answers":
            await reader.until_epoch(2)
            await engines.decode[0].wait_until(lambda stats: stats.num_running == 0)
        async for event in events:
            text += text_of(event)
    assert text == expected_text("forgotten", NUM_IDS, ignore_eos=True)
    (terminal,) = await reader.counting_terminals()
    assert terminal.status == "ok"
    if owner == "answers":
        assert terminal.epoch == 1
    else:
        assert terminal.epoch >= 2  # more, where the hasty broker gave the other copy out again
    await until_idle(pipeline)


async def test_a_job_that_comes_again_while_its_owner_is_there_is_left_to_it(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    asked: asyncio.Queue[bool],
) -> None:
    """As when a worker that was cut off gives back what another one has by now: the broker takes anybody's word."""
    keep_silent(monkeypatch, num_deliveries=1)
    monkeypatch.setattr(DecodeService, "_may_be_forgotten", lambda self, job: False)
    slow_with_one_slot(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    await pipeline.start(Role.DECODE)
    reader = Reader(pipeline)
    await reader.listen()
    request = completion(pipeline, "left") | LONG
    headers = {"X-Request-Id": reader.request_id}
    async with (
        asyncio.timeout(WATCHDOG_S),
        client.stream("POST", "/v1/completions", json=request, headers=headers) as response,
    ):
        events = sse(response.aiter_lines())
        text = text_of(await anext(events))
        await pipeline.start(Role.DECODE)
        assert await asked.get()
        async for event in events:
            text += text_of(event)
    assert text == expected_text("left", NUM_IDS, ignore_eos=True)
    (terminal,) = await reader.counting_terminals()
    assert (terminal.status, terminal.epoch) == ("ok", 1)
    await until_idle(pipeline)


async def test_an_owner_who_may_not_be_the_first_does_not_answer_as_the_first(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the first one's answer, and it may go on all the same."""
    monkeypatch.setattr(DecodeService, "_may_be_forgotten", lambda self, job: True)
    await pipeline.start(Role.DERENDER, Role.DECODE)
    async with asyncio.timeout(WATCHDOG_S):
        terminal = await job_of_a_lost_owner(pipeline, Reader(pipeline))
    assert (terminal.status, terminal.epoch) == ("ok", 2)


@pytest.mark.usefixtures("second_delivery")
async def test_an_answer_whose_beginning_is_forgotten_is_made_anew(pipeline: Pipeline) -> None:
    """Its reader, who may have got none of it, would else wait for what nobody has."""
    await pipeline.start(Role.DERENDER, Role.DECODE)
    reader = Reader(pipeline)
    late = Chunk(request_id=reader.request_id, seq=2, chunks=(b"{}",), epoch=1)
    subject = subjects.out("default", reader.request_id)
    await pipeline.broker.publish_durable(subject, wire.encode(late), message_id="late")
    async with asyncio.timeout(WATCHDOG_S):
        terminal = await job_of_a_lost_owner(pipeline, reader)
    assert (terminal.status, terminal.epoch, terminal.seq) == ("ok", 2, 0)


@pytest.mark.usefixtures("second_delivery")
async def test_a_request_is_not_rendered_again_for_what_came_behind_its_end(
    pipeline: Pipeline,
) -> None:
    """The worker that has not heard of an end goes on."""
    await pipeline.start(Role.RENDER)
    reader, jobs = Reader(pipeline), asyncio.Queue[Received]()
    out = subjects.out("default", reader.request_id)
    end = Terminal(request_id=reader.request_id, seq=0, status="ok", http_status=200, epoch=1)
    late = Chunk(request_id=reader.request_id, seq=0, chunks=(b"{}",), epoch=1)
    for number, message in enumerate((end, late)):
        message_id = f"{reader.request_id}.{number}"
        await pipeline.broker.publish_durable(out, wire.encode(message), message_id=message_id)
    render = pipeline.heartbeat(Role.RENDER)
    pool = subjects.pool(render.model, render.contract)
    await pipeline.broker.subscribe(f"hr.v1.job.{pool}.>", jobs.put_nowait)
    slug = subjects.model_slug(pipeline.settings.model.served_name)
    async with asyncio.timeout(WATCHDOG_S):
        await pipeline.broker.publish_durable(
            subjects.req("default", slug, Lane.RT),
            msgspec.json.encode(completion(pipeline, "ended")),
            message_id=f"{reader.request_id}.again",
            headers={"Hr-Request-Id": reader.request_id, "Hr-Endpoint": "completions"},
        )
        await until_settled(pipeline, WorkQueue.req(slug, Lane.RT))
    assert jobs.empty()
