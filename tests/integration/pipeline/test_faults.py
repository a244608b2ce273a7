"""What dies, hangs, repeats itself or talks rubbish; and the answer that comes all the same."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from headrace.decode.elsewhere import Elsewhere
from headrace.decode.handler import DecodeHandler
from headrace.decode.service import DecodeService
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Delivery, Received
from headrace.shared.errors import QueueFullError
from headrace.shared.messages import Chunk, DeadLetter, Handoff, Job, Prompt, Terminal
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import MAX_DELIVERIES

from .conftest import STAGES, Engines, Pipeline, keep_silent, shorten_ack_wait
from .test_flow import expected_text

LONG = {"max_tokens": 2_000, "ignore_eos": True}


def completion(pipeline: Pipeline, prompt: str, **more: Any) -> dict[str, Any]:
    model = pipeline.settings.model.served_name
    return {"model": model, "prompt": prompt, "max_tokens": 16, **more}


def slow(pipeline: Pipeline) -> None:
    """Let a step take a while, so that a test can come in between."""
    fake = msgspec.structs.replace(pipeline.settings.fake, step_s=0.002)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, fake=fake)


def pool_of(pipeline: Pipeline) -> str:
    """Return the token of the queues that the workers of this pipeline share."""
    decode = pipeline.heartbeat(Role.DECODE)
    return subjects.pool(decode.model, decode.contract)


async def sse(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    async for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


async def test_another_derender_worker_takes_over_and_each_character_comes_once(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DECODE)
    (first,) = await pipeline.start(Role.DERENDER)
    request = completion(pipeline, "take over", stream=True, **LONG)
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        events = sse(answer.aiter_lines())
        text = text_of(await anext(events))
        await first.kill()
        await pipeline.start(Role.DERENDER)
        async for event in events:
            text += text_of(event)
    assert text == expected_text("take over", 2_000, ignore_eos=True)


async def test_a_pull_that_fails_is_tried_again_and_then_prefilled_here(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    engines.prefill[0].faults.drop_pulls = True
    answer = await client.post("/v1/completions", json=completion(pipeline, "dropped"))
    assert answer.json()["choices"][0]["text"] == expected_text("dropped", 16)
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    assert record["timings"]["prefill_mode"] == "local"


async def test_a_prompt_that_the_only_prefill_worker_fails_is_computed_here(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    await pipeline.start(Role.PREFILL)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    engines.prefill[0].faults.fail_next = 1
    answer = await client.post("/v1/completions", json=completion(pipeline, "fails once"))
    assert answer.json()["choices"][0]["text"] == expected_text("fails once", 16)
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    assert record["timings"]["prefill_mode"] == "local"


async def test_a_handoff_that_comes_again_is_refused(
    pipeline: Pipeline, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    decode = pipeline.heartbeat(Role.DECODE)
    handoffs: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe(subjects.kv(decode.instance), handoffs.put_nowait)
    first = await client.post("/v1/completions", json=completion(pipeline, "once"))
    while b"handoff.v1" not in (again := await handoffs.get()).payload:
        pass
    with caplog.at_level("WARNING", logger="headrace.decode.handoff_inbox"):
        await pipeline.broker.publish(again.subject, again.payload)
        second = await client.post("/v1/completions", json=completion(pipeline, "another prompt"))
    assert first.json()["choices"][0]["text"] == expected_text("once", 16)
    assert second.json()["choices"][0]["text"] == expected_text("another prompt", 16)
    assert [r.reason for r in caplog.records if r.action == "handoff_refused"] == ["repeated"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: {"contract": "another"}, "contract"),
        (lambda h: {"prompt_hash": "0" * 32}, "prompt"),
        (lambda h: {"epoch": "before-the-restart"}, "epoch"),
        (lambda h: {"expires": time.time() + 1.0}, "expired"),
        (
            lambda h: {"kv_transfer_params": {**h.kv_transfer_params, "remote_block_ids": [[]]}},
            "no_blocks",
        ),
    ],
    ids=["contract", "prompt", "epoch", "expired", "no_blocks"],
)
async def test_a_handoff_that_does_not_fit_never_reaches_the_engine(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Any,
    reason: str,
) -> None:
    from headrace.prefill.handler import PrefillHandler

    honest = PrefillHandler.handle

    async def lying(self: PrefillHandler, task: Any) -> Handoff:
        handoff = await honest(self, task)
        return msgspec.structs.replace(handoff, **change(handoff))

    monkeypatch.setattr(PrefillHandler, "handle", lying)
    await pipeline.start(Role.GATEWAY, *STAGES)
    with caplog.at_level("WARNING", logger="headrace.decode.handoff_inbox"):
        answer = await client.post("/v1/completions", json=completion(pipeline, "does not fit"))
    assert answer.json()["choices"][0]["text"] == expected_text("does not fit", 16)
    refused = {r.reason for r in caplog.records if r.action == "handoff_refused"}  # type: ignore[attr-defined]
    assert refused == {reason}
    assert engines.decode[0].stats().num_kv_transfers == 0


async def test_a_client_that_goes_away_frees_every_block(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "going away"))
    )
    decode, prefill = held.decode[0], held.prefill[0]
    await decode.wait_until(lambda stats: stats.num_running == 1)
    request.cancel()
    await decode.wait_until(
        lambda stats: stats.num_running == 0 and stats.num_blocks_free == decode.info.num_blocks
    )
    await prefill.wait_until(lambda stats: stats.num_blocks_free == prefill.info.num_blocks)


async def test_a_dead_decode_engine_hands_its_jobs_to_another_worker_at_once(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    first, *_ = await pipeline.start(Role.DECODE)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    request = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "moved"))
    )
    await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
    held.hold_decode = False
    await pipeline.start(Role.DECODE)
    held.decode[0].die()
    answer = await request
    assert answer.json()["choices"][0]["text"] == expected_text("moved", 16)
    assert first.task.done()


async def test_a_stream_goes_on_at_another_decode_worker_when_its_engine_dies(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = completion(pipeline, "goes on", stream=True, **LONG)
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        events = sse(answer.aiter_lines())
        text = text_of(await anext(events))
        engines.decode[0].die()
        await pipeline.start(Role.DECODE)
        async for event in events:
            text += text_of(event)
    assert text == expected_text("goes on", 2_000, ignore_eos=True)


async def test_draining_finishes_what_runs_and_takes_nothing_new(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (old,) = await pipeline.start(Role.DECODE)
    running = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "running"))
    )
    await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
    old.stop.set()
    held.hold_decode = False
    await pipeline.start(Role.DECODE)
    later = await client.post("/v1/completions", json=completion(pipeline, "later"))
    assert later.json()["choices"][0]["text"] == expected_text("later", 16)
    assert not running.done()
    held.decode[0].release()
    assert (await running).json()["choices"][0]["text"] == expected_text("running", 16)
    await old.task


async def submit(pipeline: Pipeline, request_id: str, **headers: str) -> Terminal:
    """Submit straight over NATS, as another service does, and return how it ended."""
    ended: asyncio.Future[Terminal] = asyncio.get_running_loop().create_future()

    def on_out(received: Received) -> None:
        message = wire.decode(received.payload, Chunk, Terminal)
        if isinstance(message, Terminal) and not ended.done():
            ended.set_result(message)

    await pipeline.broker.subscribe(subjects.out("acme", request_id), on_out)
    await pipeline.broker.publish_durable(
        subjects.req("acme", pipeline.settings.model.served_name, Lane.STD),
        json.dumps(completion(pipeline, "from afar")).encode(),
        message_id=request_id,
        headers={"Hr-Endpoint": "completions", **headers},
    )
    return await ended


async def test_another_service_submits_straight_to_nats_and_its_result_is_kept(
    pipeline: Pipeline,
) -> None:
    await pipeline.start(*STAGES)
    terminal = await submit(pipeline, f"r-{pipeline.settings.model.served_name}")
    assert terminal.status == "ok"
    text = json.loads(terminal.body)["choices"][0]["text"]
    assert text == expected_text("from afar", 16)
    kept = await pipeline.broker.last(subjects.res("acme", terminal.request_id))
    assert kept is not None
    assert wire.decode(kept.payload, Terminal) == terminal


async def test_a_request_past_its_deadline_ends_expired_and_costs_no_engine_time(
    pipeline: Pipeline, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    terminal = await submit(
        pipeline,
        f"r-{pipeline.settings.model.served_name}",
        **{"Hr-Deadline": str(time.time() - 1)},
    )
    assert (terminal.status, terminal.http_status) == ("expired", 504)
    assert engines.decode[0].stats().num_steps == 0


async def test_a_job_of_another_contract_on_this_contracts_queue_is_refused(
    pipeline: Pipeline, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    request_id = f"r-{pipeline.settings.model.served_name}"
    ended: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe(subjects.out("acme", request_id), ended.put_nowait)
    job = Job(
        request_id=request_id,
        tenant="acme",
        model=pipeline.settings.model.served_name,
        lane=Lane.RT,
        endpoint="completions",
        created=0,
        published=time.time(),
        deadline=time.time() + 60,
        contract="of another model",
        body=b"{}",
        stream=False,
        prompts=(Prompt(token_ids=b"\x01\x00\x00\x00", sampling_params=b"\x80"),),
    )
    await pipeline.broker.publish_durable(
        subjects.job(pool_of(pipeline), "acme", Lane.RT), wire.encode(job), message_id=request_id
    )
    terminal = wire.decode((await ended.get()).payload, Terminal)
    assert (terminal.status, terminal.http_status) == ("error", 503)
    assert engines.decode[0].stats().num_steps == 0


async def test_rubbish_on_every_subject_is_put_aside_and_the_pipeline_serves_on(
    pipeline: Pipeline, client: httpx.AsyncClient
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    slug = pipeline.settings.model.served_name
    letters: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe("hr.v1.dlq.>", letters.put_nowait)
    rubbish = [
        b"",
        b"\xc1",
        b"not msgpack",
        wire.encode(Terminal(request_id="r", seq=0, status="ok", http_status=200)),
    ]
    for number, payload in enumerate(rubbish):
        pool = pool_of(pipeline)
        for subject in (subjects.job(pool, "acme", Lane.RT), subjects.prefill(pool, Lane.RT)):
            await pipeline.broker.publish_durable(
                subject, payload, message_id=f"{slug}-{subject}-{number}"
            )
        for subject in (
            subjects.kv(pipeline.heartbeat(Role.DECODE).instance),
            subjects.ctl(pipeline.heartbeat(Role.DECODE).instance),
            subjects.frames(pipeline.heartbeat(Role.DERENDER).instance),
            subjects.cancel("default", "r1"),
            subjects.heartbeat(slug, Role.PREFILL, "prefill-x"),
        ):
            await pipeline.broker.publish(subject, payload)
    for _ in range(2 * len(rubbish)):
        letter = wire.decode((await letters.get()).payload, DeadLetter)
        assert letter.payload in rubbish
    answer = await client.post("/v1/completions", json=completion(pipeline, "still here"))
    assert answer.json()["choices"][0]["text"] == expected_text("still here", 16)


def handshakes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.worker  # type: ignore[attr-defined]
        for record in caplog.records
        if getattr(record, "action", "") == "handshake_done"
    ]


async def test_decode_shakes_hands_with_prefill_before_it_is_ready_and_gives_the_blocks_back(
    pipeline: Pipeline, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="headrace.decode.peers"):
        await pipeline.start(Role.PREFILL)
        await pipeline.start(Role.DECODE)
        assert handshakes(caplog) == [pipeline.heartbeat(Role.PREFILL).instance]
    prefill = engines.prefill[0]
    await prefill.wait_until(lambda stats: stats.num_blocks_free == prefill.info.num_blocks)


async def test_a_prefill_worker_that_comes_later_is_greeted_too(
    pipeline: Pipeline, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    await pipeline.start(Role.DECODE)
    greeted = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "action", "") == "handshake_done":
                greeted.set()

    listener = Listener()
    peers = logging.getLogger("headrace.decode.peers")
    peers.addHandler(listener)
    try:
        with caplog.at_level("INFO", logger="headrace.decode.peers"):
            await pipeline.start(Role.PREFILL)
            await greeted.wait()
    finally:
        peers.removeHandler(listener)


async def test_a_job_that_ends_its_worker_each_time_is_put_aside_and_answered(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    """A few decode workers die of it; the next one does not try, and serves on."""
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    engines.poison_decode = True
    request = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "poison"))
    )
    num_workers = 0
    while not request.done():
        (worker,) = await pipeline.start(Role.DECODE)
        num_workers += 1
        await asyncio.wait({worker.task, request}, return_when=asyncio.FIRST_COMPLETED)
    assert 2 <= num_workers <= MAX_DELIVERIES + 1
    for engine in engines.decode:
        engine.faults.die_next = False
    answer = await request
    assert answer.status_code == 500
    good = await client.post("/v1/completions", json=completion(pipeline, "good"))
    assert good.json()["choices"][0]["text"] == expected_text("good", 16)


def with_model(pipeline: Pipeline, **changes: Any) -> Settings:
    """Return the pipeline's settings with another model section: another contract."""
    model = msgspec.structs.replace(pipeline.settings.model, **changes)
    return msgspec.structs.replace(pipeline.settings, model=model)


async def test_a_job_waits_for_a_busy_worker_of_its_contract_beside_a_free_one_of_another(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    decode = msgspec.structs.replace(pipeline.settings.decode, slots=1)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=decode)
    await pipeline.start(Role.GATEWAY, *STAGES)
    first = asyncio.create_task(client.post("/v1/completions", json=completion(pipeline, "one")))
    await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
    held.hold_decode = False
    await pipeline.start(Role.DECODE, settings=with_model(pipeline, max_model_len=1_000))
    jobs: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe("hr.v1.job.>", jobs.put_nowait)
    second = asyncio.create_task(client.post("/v1/completions", json=completion(pipeline, "two")))
    await jobs.get()  # it waits in the queue
    held.decode[0].release()
    answers = [(await request).json()["choices"][0]["text"] for request in (first, second)]
    assert answers == [expected_text("one", 16), expected_text("two", 16)]
    assert held.decode[1].stats().num_steps == 0


async def test_a_prefill_worker_of_another_contract_gets_nothing(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    await pipeline.start(Role.PREFILL, settings=with_model(pipeline, max_model_len=1_000))
    for number in range(6):
        answer = await client.post("/v1/completions", json=completion(pipeline, f"number {number}"))
        assert answer.json()["choices"][0]["text"] == expected_text(f"number {number}", 16)
    assert engines.prefill[1].stats().num_steps == 0


async def test_two_tenants_may_use_the_same_request_id(pipeline: Pipeline) -> None:
    await pipeline.start(*STAGES)
    slug = pipeline.settings.model.served_name
    ends: asyncio.Queue[Received] = asyncio.Queue()
    texts = {}
    for tenant in ("acme", "umbrella"):
        await pipeline.broker.subscribe(subjects.out(tenant, f"r-{slug}"), ends.put_nowait)
        assert await pipeline.broker.publish_durable(
            subjects.req(tenant, slug, Lane.STD),
            json.dumps(completion(pipeline, f"for {tenant}")).encode(),
            message_id=f"{tenant}.r-{slug}",
            headers={"Hr-Request-Id": f"r-{slug}", "Hr-Endpoint": "completions"},
        )
    for _ in range(2):
        received = await ends.get()
        terminal = wire.decode(received.payload, Chunk, Terminal)
        assert isinstance(terminal, Terminal)
        texts[received.subject.split(".")[3]] = json.loads(terminal.body)["choices"][0]["text"]
    assert texts == {name: expected_text(f"for {name}", 16) for name in ("acme", "umbrella")}


async def test_a_submission_with_a_wrong_header_is_answered(pipeline: Pipeline) -> None:
    await pipeline.start(*STAGES)
    terminal = await submit(
        pipeline, f"r-{pipeline.settings.model.served_name}", **{"Hr-Deadline": "soon"}
    )
    assert (terminal.status, terminal.http_status) == ("error", 400)
    assert b"Hr-Deadline must be Unix seconds" in terminal.body


async def test_a_full_job_queue_is_a_429_at_once(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    publish = Broker.publish_durable

    async def full(self: Broker, subject: str, *args: Any, **more: Any) -> bool:
        if subject.startswith("hr.v1.job."):
            raise QueueFullError("the job queue is full")
        return await publish(self, subject, *args, **more)

    monkeypatch.setattr(Broker, "publish_durable", full)
    answer = await client.post("/v1/completions", json=completion(pipeline, "too much"))
    assert answer.status_code == 429
    assert float(answer.headers["retry-after"]) > 0


async def test_a_dead_letter_that_can_not_be_stored_ends_no_worker(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    publish, refused = Broker.publish_durable, asyncio.Event()

    async def full(self: Broker, subject: str, *args: Any, **more: Any) -> bool:
        if subject.startswith("hr.v1.dlq."):
            refused.set()
            raise QueueFullError("the broker's store is full")
        return await publish(self, subject, *args, **more)

    monkeypatch.setattr(Broker, "publish_durable", full)
    await publish(
        pipeline.broker,
        subjects.job(pool_of(pipeline), "acme", Lane.RT),
        b"rubbish",
        message_id="bad",
    )
    await refused.wait()
    answer = await client.post("/v1/completions", json=completion(pipeline, "still here"))
    assert answer.json()["choices"][0]["text"] == expected_text("still here", 16)
    assert not any(service.task.done() for service in pipeline.services)


async def test_a_later_terminal_of_a_kept_result_is_not_published(
    pipeline: Pipeline,
) -> None:
    await pipeline.start(*STAGES)
    request_id = f"r-{pipeline.settings.model.served_name}"
    earlier = Terminal(request_id=request_id, seq=0, status="ok", http_status=200, body=b'"first"')
    await pipeline.broker.publish_durable(
        subjects.res("acme", request_id), wire.encode(earlier), message_id=f"{request_id}.earlier"
    )
    assert await submit(pipeline, request_id) == earlier


async def test_a_job_that_comes_again_to_the_worker_that_has_it_still_is_not_run_twice(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    held: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a pause that was longer than `ack_wait`: the broker gives the job to the same worker again."""
    came_again = asyncio.Event()
    work = DecodeService._work

    async def noted(self: DecodeService, delivery: Delivery) -> None:
        if delivery.num_delivered > 1:
            came_again.set()
        await work(self, delivery)

    monkeypatch.setattr(DecodeService, "_work", noted)
    keep_silent(monkeypatch)
    shorten_ack_wait(monkeypatch, 0.3)
    await pipeline.start(Role.GATEWAY, *STAGES)
    answering = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "paused"))
    )
    await came_again.wait()
    assert held.decode[0].stats().num_running == 1
    held.decode[0].release()
    answer = await answering
    assert answer.json()["choices"][0]["text"] == expected_text("paused", 16)


async def test_a_job_that_comes_twice_while_others_are_asked_for_it_is_run_once(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a dead worker's job is given back by two of those that saw it die."""
    asking, num_runs = itertools.count(1), itertools.count()
    both = asyncio.Event()
    generate = DecodeHandler.generate

    async def has(self: Elsewhere, job: Job) -> bool:
        if next(asking) == 2:
            both.set()
        await both.wait()
        return False

    async def counted(self: DecodeHandler, *given: Any) -> None:
        next(num_runs)
        await generate(self, *given)

    monkeypatch.setattr(Elsewhere, "has", has)
    keep_silent(monkeypatch)
    monkeypatch.setattr(DecodeHandler, "generate", counted)
    monkeypatch.setattr(DecodeService, "_may_be_forgotten", lambda self, job: True)
    shorten_ack_wait(monkeypatch, 0.3)
    await pipeline.start(Role.GATEWAY, *STAGES)
    answer = await client.post("/v1/completions", json=completion(pipeline, "twice"))
    assert answer.json()["choices"][0]["text"] == expected_text("twice", 16)
    assert next(num_runs) == 1
