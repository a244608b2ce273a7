"""What happens to a prompt between decode and prefill: workers that die, drain, hang or cannot be pulled from."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from headrace.engine.fake_engine import FakeDecodeEngine, FakePrefillEngine
from headrace.engine.interface import EngineStats
from headrace.prefill import service as prefill_service
from headrace.prefill.errand import Answer, Errand
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received
from headrace.shared.errors import BrokerError, EngineRequestError
from headrace.shared.intake import Intake
from headrace.shared.messages import Cancel, Handoff, PrefillTask
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role
from headrace.shared.worker import Worker
from headrace.shared.workers import WorkerTable

from .conftest import STAGES, Engines, Pipeline, Service
from .test_faults import completion, pool_of
from .test_flow import expected_text


@pytest.fixture
def killed_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is killed says no goodbye: only its connections end."""

    async def leave(self: Worker) -> None:
        pass

    monkeypatch.setattr(Worker, "leave", leave)


async def ask(client: httpx.AsyncClient, pipeline: Pipeline, prompt: str) -> dict[str, Any]:
    """Return the timings of a request that is answered as it should be."""
    answer = await client.post("/v1/completions", json=completion(pipeline, prompt))
    assert answer.json()["choices"][0]["text"] == expected_text(prompt, 16)
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    timings: dict[str, Any] = record["timings"]
    return timings


async def busy(engines: Engines, services: list[Service]) -> tuple[FakePrefillEngine, Service]:
    """Return the first prefill engine that has a request, and its service."""
    waits = {
        asyncio.create_task(engine.wait_until(lambda stats: stats.num_running == 1)): number
        for number, engine in enumerate(engines.prefill)
    }
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    number = waits[done.pop()]
    return engines.prefill[number], services[number]


async def all_free(*engines: FakePrefillEngine | FakeDecodeEngine) -> None:
    for engine in engines:
        await engine.wait_until(
            lambda stats, total=engine.info.num_blocks: (  # type: ignore[misc]
                stats.num_running == 0 and stats.num_blocks_free == total
            )
        )


async def start_held(pipeline: Pipeline, engines: Engines, num_prefills: int) -> list[Service]:
    """Start everything, with prefill workers that hold each prompt; return those."""
    services = await pipeline.start(*[Role.PREFILL] * num_prefills)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    for engine in engines.prefill:
        engine.faults.hold = True  # not before: decode has shaken hands with each of them
    return services


@pytest.mark.usefixtures("killed_silently")
@pytest.mark.parametrize("num_prefills", [1, 2])
async def test_a_prompt_whose_worker_is_killed_is_computed_elsewhere_or_else_here(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines, num_prefills: int
) -> None:
    services = await start_held(pipeline, engines, num_prefills)
    asking = asyncio.create_task(ask(client, pipeline, "killed"))
    engine, service = await busy(engines, services)
    for other in engines.prefill:
        if other is not engine:
            other.release()
    await service.kill()
    timings = await asking
    assert timings["prefill_mode"] == ("remote" if num_prefills > 1 else "local")
    await all_free(*(other for other in engines.prefill if other is not engine), *engines.decode)


async def test_a_prefill_engine_that_dies_says_so_and_another_worker_computes(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    services = await start_held(pipeline, engines, 2)
    asking = asyncio.create_task(ask(client, pipeline, "dies"))
    engine, service = await busy(engines, services)
    for other in engines.prefill:
        if other is not engine:
            other.release()
    engine.die()
    assert (await asking)["prefill_mode"] == "remote"
    await asyncio.wait({service.task})


@pytest.mark.usefixtures("killed_silently")
async def test_a_running_prefill_ends_when_its_decode_worker_is_killed(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    await start_held(pipeline, engines, 1)
    decode = next(service for service in pipeline.services if service.role is Role.DECODE)
    asking = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "nobody waits"))
    )
    await engines.prefill[0].wait_until(lambda stats: stats.num_running == 1)
    await decode.kill()
    await all_free(engines.prefill[0])
    asking.cancel()


@pytest.mark.usefixtures("killed_silently")
async def test_a_prompt_that_is_done_after_its_decode_worker_was_killed_holds_no_blocks(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handoff reached nobody: its blocks need not wait for the end of the lease, which is an hour."""
    nixl = msgspec.structs.replace(pipeline.settings.nixl, lease_s=3600.0)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, nixl=nixl)
    done, killed, tell = asyncio.Event(), asyncio.Event(), Errand._tell

    async def tell_later(self: Errand, answer: Answer) -> Answer | None:
        done.set()
        await killed.wait()
        return await tell(self, answer)

    await start_held(pipeline, engines, 1)
    monkeypatch.setattr(Errand, "_tell", tell_later)
    decode = next(service for service in pipeline.services if service.role is Role.DECODE)
    asking = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "nobody waits"))
    )
    async with asyncio.timeout(60):
        await engines.prefill[0].wait_until(lambda stats: stats.num_running == 1)
        engines.prefill[0].release()
        await done.wait()
        assert engines.prefill[0].stats().num_leases == 1
        await decode.kill()
        killed.set()
        await all_free(engines.prefill[0])
    asking.cancel()


async def test_a_cancel_ends_every_prompt_of_a_request_in_prefill(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    await start_held(pipeline, engines, 1)
    request = completion(pipeline, "") | {"prompt": ["one", "two", "three"]}
    asking = asyncio.create_task(client.post("/v1/completions", json=request))
    await engines.prefill[0].wait_until(lambda stats: stats.num_running == 3)
    asking.cancel()
    await all_free(engines.prefill[0], engines.decode[0])


async def test_a_task_on_the_queue_of_a_worker_that_drains_is_computed_elsewhere(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refill = Intake._refill

    def from_the_shared_queues_alone(self: Intake) -> None:
        if len(self._queues) > 1:  # a take on its own queue may still wait when the slot is gone
            refill(self)

    monkeypatch.setattr(Intake, "_refill", from_the_shared_queues_alone)
    one = msgspec.structs.replace(pipeline.settings.prefill, slots=1)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, prefill=one)
    services = await start_held(pipeline, engines, 2)
    first = asyncio.create_task(ask(client, pipeline, "first"))
    engine, service = await busy(engines, services)
    ((other, other_service),) = (
        pair for pair in zip(engines.prefill, services, strict=True) if pair[0] is not engine
    )
    second = asyncio.create_task(ask(client, pipeline, "second"))
    await other.wait_until(lambda stats: stats.num_running == 1)
    tasks: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe("hr.v1.pf.*.*", tasks.put_nowait)
    engine.die()  # its task goes to the queue of the other one, which has no slot
    waiting = await tasks.get()
    assert waiting.subject.rpartition(".")[2].startswith("prefill-")
    other_service.stop.set()
    assert (await first)["prefill_mode"] == "local"
    other.release()
    assert (await second)["prefill_mode"] == "remote"
    await asyncio.wait({service.task, other_service.task})


async def test_a_handoff_that_is_lost_on_its_way_comes_again(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request, lost = Broker.request, []

    async def lossy(self: Broker, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        if subject.startswith("hr.v1.kv.") and b"handoff.v1" in payload and not lost:
            lost.append(subject)
            raise BrokerError("no answer in time")
        return await request(self, subject, payload, timeout_s=timeout_s)

    monkeypatch.setattr(Broker, "request", lossy)
    await pipeline.start(Role.GATEWAY, *STAGES)
    assert (await ask(client, pipeline, "lost"))["prefill_mode"] == "remote"
    assert lost
    await all_free(*engines.prefill, *engines.decode)


class Dropped(logging.Handler):
    """Waits until prefill workers have dropped tasks that nobody waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "action", "") == "prefill_dropped":
            self._dropped.put_nowait(record.request_id)  # type: ignore[attr-defined]

    async def wait_for(self, *request_ids: str) -> None:
        """Return when tasks of these requests were dropped, in whatever order."""
        missing = Counter(request_ids)
        while missing:
            missing -= Counter([await self._dropped.get()])


@pytest.fixture
def dropped() -> Iterator[Dropped]:
    dropped = Dropped()
    logger = logging.getLogger("headrace.prefill.errand")
    level = logger.level
    logger.addHandler(dropped)
    logger.setLevel(logging.INFO)
    yield dropped
    logger.setLevel(level)
    logger.removeHandler(dropped)


async def test_a_task_that_comes_again_is_computed_once(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines, dropped: Dropped
) -> None:
    services = await start_held(pipeline, engines, 2)
    tasks: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe("hr.v1.pf.*.*", tasks.put_nowait)
    asking = asyncio.create_task(ask(client, pipeline, "twice"))
    task = wire.decode((await tasks.get()).payload, PrefillTask)
    engine, _ = await busy(engines, services)
    before = [e.stats().num_local_computed_token_ids for e in engines.prefill]
    unknown = msgspec.structs.replace(task, task_id="unknown", request_id="unknown")
    for worker in pipeline.table.ready(Role.PREFILL):
        queue = subjects.prefill_worker(pool_of(pipeline), worker.instance)
        for copy in (task, task, unknown):
            await pipeline.broker.publish_durable(
                queue, wire.encode(copy), message_id=uuid.uuid4().hex
            )
    # The worker that computes it keeps its copies until it is done; the other one has its copies dropped one by one.
    await dropped.wait_for("unknown", "unknown", task.request_id, task.request_id)
    for held in engines.prefill:
        await held.wait_until(lambda stats, n=int(held is engine): stats.num_running == n)  # type: ignore[misc]
        held.release()
    await asking
    after = [e.stats().num_local_computed_token_ids for e in engines.prefill]
    assert sum(after) - sum(before) == len("twice")
    await all_free(*engines.prefill, *engines.decode)


async def test_a_prefill_worker_that_cannot_be_shaken_hands_with_is_not_asked(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm, dead = FakeDecodeEngine.warm_handshake, set[str]()
    again = asyncio.Event()

    async def handshake(self: FakeDecodeEngine, kv: dict[str, Any]) -> None:
        await warm(self, kv)
        if kv["remote_engine_id"] in dead:
            again.set()
            raise EngineRequestError("the side channel is dead")

    monkeypatch.setattr(FakeDecodeEngine, "warm_handshake", handshake)
    await pipeline.start(Role.PREFILL)
    first = pipeline.heartbeat(Role.PREFILL).instance
    dead.add(engines.prefill[0].info.engine_id)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    assert (await ask(client, pipeline, "alone"))["prefill_mode"] == "local"
    await pipeline.start(Role.PREFILL)
    for number in range(4):
        timings = await ask(client, pipeline, f"number {number}")
        assert timings["prefill_mode"] == "remote"
        assert timings["workers"]["prefill"] != first
    again.clear()
    await again.wait()  # it is tried again all the time
    dead.clear()


async def test_a_worker_whose_pulls_fail_is_not_asked_any_more(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    engines.prefill[0].faults.drop_pulls = True
    for number in range(4):
        assert (await ask(client, pipeline, f"dropped {number}"))["prefill_mode"] == "local"
    assert engines.prefill[0].stats().num_leases <= 2


def slow_expiry(settings: Settings, timeout_s: float) -> Settings:
    decode = msgspec.structs.replace(settings.decode, prefill_timeout_s=timeout_s)
    return msgspec.structs.replace(settings, decode=decode)


async def test_a_prefill_that_takes_too_long_is_aborted_and_computed_here(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines
) -> None:
    pipeline.settings = slow_expiry(pipeline.settings, 0.2)
    await start_held(pipeline, engines, 1)
    assert (await ask(client, pipeline, "too long"))["prefill_mode"] == "local"
    await all_free(engines.prefill[0], engines.decode[0])


async def test_a_cancel_between_the_legs_frees_the_blocks_of_both(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    """The handoff is there, and decode's engine has not pulled it."""
    await pipeline.start(Role.GATEWAY, *STAGES)
    handoffs: asyncio.Queue[Received] = asyncio.Queue()
    decode = pipeline.heartbeat(Role.DECODE)
    await pipeline.broker.subscribe(subjects.kv(decode.instance), handoffs.put_nowait)
    asking = asyncio.create_task(client.post("/v1/completions", json=completion(pipeline, "off")))
    while b"handoff.v1" not in (received := await handoffs.get()).payload:
        pass
    request_id = wire.decode(received.payload, Handoff).request_id
    cancel = Cancel(request_id=request_id, tenant="default", reason="test")
    await pipeline.broker.publish(subjects.cancel("default", request_id), wire.encode(cancel))
    assert (await asking).status_code == 499
    await all_free(held.prefill[0], held.decode[0])


class Processes:
    """Prefill workers that are processes, with the fake engine, and can be killed for real."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._by_name: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, **faults: Any) -> str:
        """Start one, and return its instance once it is ready."""
        known = {worker.instance for worker in self._pipeline.table.ready(Role.PREFILL)}
        process = self._spawn(faults)

        def new(table: WorkerTable) -> set[str]:
            return {worker.instance for worker in table.ready(Role.PREFILL)} - known

        await self._pipeline.table.wait_for(lambda table: bool(new(table)))
        (instance,) = new(self._pipeline.table)
        self._by_name[instance] = process
        return instance

    def _spawn(self, faults: dict[str, Any]) -> subprocess.Popen[bytes]:
        settings = self._pipeline.settings
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", "serve", "prefill", "--engine", "fake"],
            env={
                **os.environ,
                "HEADRACE_BROKER_URL": settings.broker.url,
                "HEADRACE_MODEL_SERVED_NAME": settings.model.served_name,
                "HEADRACE_FAKE_PREFILL_S_PER_1K": "0",
                "HEADRACE_FAKE_FAULTS": json.dumps({"prefill": faults}),
            },
            start_new_session=True,
        )
        self._by_name[f"starting {len(self._by_name)}"] = process
        return process

    def kill(self, instance: str) -> None:
        self._by_name[instance].kill()

    def end(self) -> None:
        for process in self._by_name.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def processes(pipeline: Pipeline) -> Iterator[Processes]:
    processes = Processes(pipeline)
    yield processes
    processes.end()


@pytest.mark.parametrize("is_alone", [True, False], ids=["the only one", "one of two"])
async def test_a_prompt_survives_a_kill_of_the_process_that_computes_it(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    processes: Processes,
    is_alone: bool,
) -> None:
    taken: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    doomed = await processes.start(extra_s=3600.0)  # it does not even shake hands
    decode = pipeline.heartbeat(Role.DECODE)
    await pipeline.broker.subscribe(subjects.kv(decode.instance), taken.put_nowait)
    asking = asyncio.create_task(ask(client, pipeline, "killed in the middle"))
    while b"started.v1" not in (await taken.get()).payload:
        pass
    if not is_alone:
        await pipeline.start(Role.PREFILL)
    processes.kill(doomed)
    timings = await asking
    assert timings["prefill_mode"] == ("local" if is_alone else "remote")
    await all_free(*engines.prefill, *engines.decode)


async def test_a_prefill_worker_that_drains_keeps_a_handoff_until_it_is_pulled(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_service, "LEASE_POLL_S", 0.01)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER)
    (draining,) = await pipeline.start(Role.PREFILL)
    (engine,) = engines.prefill
    engine.faults.hang_pulls = True
    asking = asyncio.create_task(ask(client, pipeline, "not yet pulled"))
    await engines.decode[0].wait_until(lambda stats: stats.num_running == 1)
    draining.stop.set()
    await asyncio.wait({draining.task, looks_at(engine)}, return_when=asyncio.FIRST_COMPLETED)
    assert not draining.task.done()
    engine.release()
    assert (await asking)["prefill_mode"] == "remote"
    await draining.task


async def test_a_prefill_worker_that_drains_keeps_a_handoff_until_it_is_expired(
    pipeline: Pipeline, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_service, "LEASE_POLL_S", 0.01)
    (draining,) = await pipeline.start(Role.PREFILL)
    (engine,) = engines.prefill
    await engine.prefill("t1", [1, 2, 3], cache_salt=None, priority=0)
    draining.stop.set()
    await asyncio.wait({draining.task, looks_at(engine)}, return_when=asyncio.FIRST_COMPLETED)
    assert not draining.task.done()
    engine.expire_leases()
    await draining.task


def looks_at(engine: FakePrefillEngine) -> asyncio.Future[None]:
    """Return what is done once somebody has often looked at an engine."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stats, left = engine.stats, itertools.count(10, -1)

    def look() -> EngineStats:
        if next(left) == 0:
            done.set_result(None)
        return stats()

    engine.stats = look  # type: ignore[method-assign]
    return done
