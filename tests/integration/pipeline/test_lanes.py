"""Who goes first: a person before everything else, and a batch on what is left; and nobody is forgotten."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from headrace.render.renderer_fake import FakeRenderer
from headrace.shared import subjects, wire
from headrace.shared import worker as worker_module
from headrace.shared.broker import Delivery, Received, WorkQueue
from headrace.shared.messages import Chunk, DeadLetter, Job, Prompt, Takeover, Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.readers import Readers
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import MAX_DELIVERIES

from .conftest import STAGES, Engines, Pipeline, piped
from .test_flow import expected_text

NUM_SLOTS = 2
BULK = "a prompt that is longer than that of any person"


def few_slots(pipeline: Pipeline, num_slots: int = NUM_SLOTS) -> None:
    decode = msgspec.structs.replace(pipeline.settings.decode, slots=num_slots)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=decode)


def body(pipeline: Pipeline, prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": pipeline.settings.model.served_name, "prompt": prompt, "max_tokens": 16} | more


class Caller:
    """Submits straight over NATS, and knows how each request ended."""

    def __init__(self, pipeline: Pipeline, tenant: str = "acme") -> None:
        self._pipeline = pipeline
        self.tenant = tenant

    async def submit(
        self, lane: Lane, prompt: str, *, headers: dict[str, str] | None = None, **more: Any
    ) -> asyncio.Future[Terminal]:
        """Return what becomes the terminal of a completion."""
        ended: asyncio.Future[Terminal] = asyncio.get_running_loop().create_future()

        def on_out(received: Received) -> None:
            message = wire.decode(received.payload, Chunk, Terminal, Takeover)
            if isinstance(message, Terminal):
                ended.set_result(message)  # a second one fails the test

        request_id, broker = uuid.uuid4().hex, self._pipeline.broker
        await broker.subscribe(subjects.out(self.tenant, request_id), on_out)
        slug = self._pipeline.settings.model.served_name
        await broker.publish_durable(
            subjects.req(self.tenant, slug, lane),
            json.dumps(body(self._pipeline, prompt, **more)).encode(),
            message_id=f"{self.tenant}.{request_id}",
            headers={"Hr-Endpoint": "completions", "Hr-Request-Id": request_id} | (headers or {}),
        )
        return ended


def text_of(terminal: Terminal) -> str:
    assert terminal.status == "ok", terminal.body
    return str(json.loads(terminal.body)["choices"][0]["text"])


async def all_blocks_are_free(engines: Engines) -> None:
    for engine in (*engines.decode, *engines.prefill):
        await engine.wait_until(
            lambda stats, engine=engine: (
                stats.num_running == 0 and stats.num_blocks_free == engine.info.num_blocks
            )
        )


async def test_a_person_gets_a_slot_of_a_batch_at_once_and_the_batch_ends_right_later(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    few_slots(pipeline)
    await pipeline.start(Role.GATEWAY, *STAGES)
    decode = held.decode[0]
    decode.faults.hold_from = len(BULK)
    caller = Caller(pipeline)
    batch = [await caller.submit(Lane.BULK, f"{BULK} {number}") for number in range(4)]
    await decode.wait_until(lambda _: decode.num_held == NUM_SLOTS)
    for number in range(3):
        answer = await client.post("/v1/completions", json=body(pipeline, f"person {number}"))
        assert answer.json()["choices"][0]["text"] == expected_text(f"person {number}", 16)
    assert not any(end.done() for end in batch)
    decode.release()
    assert [text_of(await end) for end in batch] == [
        expected_text(f"{BULK} {number}", 16) for number in range(4)
    ]
    await all_blocks_are_free(held)


async def test_a_batch_job_that_is_preempted_many_times_is_answered_in_the_end(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    few_slots(pipeline, 1)
    await pipeline.start(Role.GATEWAY, *STAGES)
    decode = held.decode[0]
    decode.faults.hold_from = len(BULK)
    ended = await Caller(pipeline).submit(Lane.BULK, BULK)
    for number in range(MAX_DELIVERIES + 3):
        await decode.wait_until(lambda _: decode.num_held == 1)
        answer = await client.post("/v1/completions", json=body(pipeline, f"person {number}"))
        assert answer.status_code == 200
    decode.release()
    assert text_of(await ended) == expected_text(BULK, 16)
    await all_blocks_are_free(held)


async def test_a_batch_job_is_left_alone_while_another_worker_has_a_free_slot(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    held: Engines,
    caplog: pytest.LogCaptureFixture,
) -> None:
    few_slots(pipeline, 4)
    await pipeline.start(Role.GATEWAY, *STAGES)
    busy = held.decode[0]
    busy.faults.hold_from = len(BULK)
    caller = Caller(pipeline)
    batch = [await caller.submit(Lane.BULK, BULK) for _ in range(4)]
    await busy.wait_until(lambda _: busy.num_held == 4)
    held.hold_decode = False
    await pipeline.start(Role.DECODE)
    with caplog.at_level("INFO", logger="headrace.decode.service"):
        for number in range(8):
            answer = await client.post("/v1/completions", json=body(pipeline, f"person {number}"))
            assert answer.status_code == 200
    assert not [r for r in caplog.records if getattr(r, "action", "") == "job_preempted"]
    busy.release()
    assert {text_of(await end) for end in batch} == {expected_text(BULK, 16)}


async def test_a_person_waits_for_a_killed_render_worker_no_longer_than_for_a_breath(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WorkQueue.req("m", Lane.RT).ack_wait_s < 2.0
    taken, render = asyncio.Event(), FakeRenderer.render

    async def for_ever(self: FakeRenderer, *args: Any) -> Any:
        taken.set()
        await asyncio.Event().wait()

    async def without_a_word(self: Delivery, delay_s: float = 0) -> None:
        """As a killed process: the message is not given back."""

    monkeypatch.setattr(FakeRenderer, "render", for_ever)
    first, *_ = await pipeline.start(Role.RENDER, Role.GATEWAY)
    await pipeline.start(Role.PREFILL, Role.DECODE, Role.DERENDER)
    answering = asyncio.create_task(client.post("/v1/completions", json=body(pipeline, "again")))
    await taken.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "nak", without_a_word)
        await first.kill()
    monkeypatch.setattr(FakeRenderer, "render", render)
    await pipeline.start(Role.RENDER)
    assert (await answering).json()["choices"][0]["text"] == expected_text("again", 16)


async def test_a_render_worker_that_is_killed_between_an_end_and_its_ack_leaves_one_end(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks: asyncio.Queue[int] = asyncio.Queue()
    ack = Delivery.ack

    async def not_at_first(self: Delivery) -> None:
        if self.num_delivered > 1:
            await ack(self)
        acks.put_nowait(self.num_delivered)

    monkeypatch.setattr(Delivery, "ack", not_at_first)
    ends: list[Received] = []
    slug = pipeline.settings.model.served_name
    await pipeline.broker.subscribe(subjects.out("default", f"r-{slug}"), ends.append)
    await pipeline.start(Role.RENDER)
    await pipeline.broker.publish_durable(
        subjects.req("default", slug, Lane.RT),
        b'{"messages": "none"}',
        message_id=f"r-{slug}",
    )
    async with asyncio.timeout(60):
        assert (await acks.get(), await acks.get()) == (1, 2)
        await pipeline.broker._data.flush()  # what was published before has come
    assert [wire.decode(end.payload, Terminal).http_status for end in ends] == [400]


async def test_a_request_whose_reader_is_gone_ends_and_frees_everything(
    pipeline: Pipeline, held: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "Readers", partial(Readers, gone_s=1.5))
    await pipeline.start(*STAGES)
    caller = Caller(pipeline)
    gone = {"Hr-Reader": "gateway-that-was-killed"}
    ended = await caller.submit(Lane.RT, "nobody reads this", headers=gone)
    later = await caller.submit(Lane.STD, "this is fetched later", headers=gone)
    end = await ended
    assert (end.status, end.http_status) == ("cancelled", 499)
    assert b"its reader is gone" in end.body
    held.decode[0].release()
    assert text_of(await later) == expected_text("this is fetched later", 16)
    await all_blocks_are_free(held)


async def test_work_past_its_deadline_ends_expired_in_its_result_whoever_finds_it(
    pipeline: Pipeline, held: Engines
) -> None:
    few_slots(pipeline, 1)
    await pipeline.start(*STAGES)
    decode, caller = held.decode[0], Caller(pipeline)
    decode.faults.hold_from = len(BULK)
    running = await caller.submit(Lane.STD, BULK, request_timeout=1.0)
    await decode.wait_until(lambda _: decode.num_held == 1)
    waiting = [
        await caller.submit(lane, "waits", request_timeout=0.5) for lane in (Lane.STD, Lane.BULK)
    ]
    for ended in (running, *waiting):
        end = await ended
        assert (end.status, end.http_status) == ("expired", 504)
        kept = await pipeline.broker.last(subjects.res(caller.tenant, end.request_id))
        assert kept is not None
        assert wire.decode(kept.payload, Terminal).status == "expired"
    assert decode.stats().num_local_computed_token_ids == 0
    await all_blocks_are_free(held)


@pytest.fixture
async def small(settings: Settings, own_server: NatsServer) -> AsyncIterator[Pipeline]:
    """A pipeline on a broker of its own, that holds four messages a tenant, model and lane."""
    limits = msgspec.structs.replace(settings.broker, url=own_server.url, max_queued_per_subject=4)
    async with piped(msgspec.structs.replace(settings, broker=limits)) as pipeline:
        yield pipeline


async def test_a_tenant_that_floods_a_lane_is_refused_at_once_and_no_other_is(
    small: Pipeline, held: Engines
) -> None:
    few_slots(small, 1)
    await small.start(*STAGES)
    flood, other = Caller(small, "flood"), Caller(small, "other")
    jobs: asyncio.Queue[Received] = asyncio.Queue()
    await small.broker.subscribe("hr.v1.job.>", jobs.put_nowait)
    accepted = []
    for number in range(4):
        accepted.append(await flood.submit(Lane.STD, f"{number}"))
        await jobs.get()
    refused = await (await flood.submit(Lane.STD, "too much"))
    assert (refused.status, refused.http_status) == ("error", 429)
    assert refused.retry_after_s is not None
    accepted.append(await other.submit(Lane.STD, "of another"))
    await jobs.get()
    held.decode[0].release()
    texts = [text_of(await end) for end in accepted]
    prompts = [*map(str, range(4)), "of another"]
    assert texts == [expected_text(prompt, 16) for prompt in prompts]


def job_of(pipeline: Pipeline, request_id: str, **changes: Any) -> Job:
    decode = pipeline.heartbeat(Role.DECODE)
    job = Job(
        request_id=request_id,
        tenant="acme",
        model=decode.model,
        lane=Lane.RT,
        endpoint="completions",
        created=0,
        published=time.time(),
        deadline=time.time() + 60,
        contract=decode.contract,
        body=json.dumps(body(pipeline, "x")).encode(),
        stream=False,
        prompts=(Prompt(token_ids=b"\x01\x00\x00\x00", sampling_params=b"\x80"),),
    )
    return msgspec.structs.replace(job, **changes)


async def publish_job(pipeline: Pipeline, job: Job, tenant: str = "acme") -> None:
    decode = pipeline.heartbeat(Role.DECODE)
    pool = subjects.pool(decode.model, decode.contract)
    await pipeline.broker.publish_durable(
        subjects.job(pool, tenant, Lane.RT), wire.encode(job), message_id=job.request_id
    )


async def test_a_request_for_more_choices_than_a_worker_bears_is_a_400(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    decode = msgspec.structs.replace(pipeline.settings.decode, max_choices=4)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=decode)
    await pipeline.start(Role.GATEWAY, *STAGES)
    for more, param in (({"n": 5}, "n"), ({"prompt": ["a"] * 5}, "prompt")):
        answer = await client.post("/v1/completions", json=body(pipeline, "x") | more)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert "decode.max_choices" in error["message"]
    answer = await client.post("/v1/completions", json=body(pipeline, "x", n=4))
    assert len(answer.json()["choices"]) == 4


@pytest.mark.parametrize("n", [100_000, 0, -1])
async def test_a_job_that_render_would_not_have_made_is_refused_and_the_worker_serves_on(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines, n: int
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    request_id, ends = uuid.uuid4().hex, asyncio.Queue[Received]()
    await pipeline.broker.subscribe(subjects.out("acme", request_id), ends.put_nowait)
    await publish_job(pipeline, job_of(pipeline, request_id, n=n))
    end = wire.decode((await ends.get()).payload, Terminal)
    assert (end.status, end.http_status) == ("error", 400)
    assert engines.decode[0].stats().num_steps == 0
    answer = await client.post("/v1/completions", json=body(pipeline, "still here"))
    assert answer.json()["choices"][0]["text"] == expected_text("still here", 16)


async def test_a_job_of_one_tenant_on_the_subject_of_another_is_put_aside_and_nobody_is_told(
    pipeline: Pipeline, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    letters, outs = asyncio.Queue[Received](), asyncio.Queue[Received]()
    slug = pipeline.settings.model.served_name
    await pipeline.broker.subscribe(subjects.dead_letter(Role.DECODE, slug), letters.put_nowait)
    await pipeline.broker.subscribe("hr.v1.out.acme.*", outs.put_nowait)
    await publish_job(pipeline, job_of(pipeline, uuid.uuid4().hex), tenant="evil")
    letter = wire.decode((await letters.get()).payload, DeadLetter)
    assert "a job of tenant acme" in letter.reason
    assert outs.empty()
    assert engines.decode[0].stats().num_steps == 0
