"""A cancel at every stage: it reaches the engines, every block comes back, and the client is told at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

from headrace.derender.service import DerenderService
from headrace.prefill.service import PrefillService
from headrace.render.renderer_fake import FakeRenderer
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.cancels import Cancels
from headrace.shared.messages import Chunk, Takeover, Terminal
from headrace.shared.subjects import Lane, Role

from .conftest import STAGES, Engines, Pipeline
from .test_faults import pool_of
from .test_flow import expected_text

PROMPT = "a prompt that is cancelled"
AHEAD = "ahead"


@dataclass
class Bench:
    """A pipeline, a request that is under way, and what the test may hold up."""

    pipeline: Pipeline
    client: httpx.AsyncClient
    engines: Engines
    patch: pytest.MonkeyPatch
    stream: bool = False
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    answering: asyncio.Task[httpx.Response] | None = None
    ended: asyncio.Future[Terminal] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def start(self, *roles: Role) -> None:
        await self.pipeline.start(*roles)

    def post(self, prompt: str, **more: Any) -> asyncio.Task[httpx.Response]:
        model = self.pipeline.settings.model.served_name
        body = {"model": model, "prompt": prompt, "max_tokens": 16} | more
        headers = {"X-Request-Id": more.pop("id", uuid.uuid4().hex)}
        body.pop("id", None)
        return asyncio.create_task(self.client.post("/v1/completions", json=body, headers=headers))

    async def submit(self, **more: Any) -> None:
        """Send the request that will be cancelled."""

        def on_out(received: Received) -> None:
            message = wire.decode(received.payload, Chunk, Terminal, Takeover)
            if isinstance(message, Terminal):
                self.ended.set_result(message)  # a second one fails the test

        await self.pipeline.broker.subscribe(subjects.out("default", self.request_id), on_out)
        self.answering = self.post(PROMPT, id=self.request_id, stream=self.stream, **more)

    async def is_published(self, pattern: str) -> None:
        """Wait for a message on a subject."""
        seen = asyncio.Event()
        await self.pipeline.broker.subscribe(pattern, lambda _: seen.set())
        await self.submit()
        await seen.wait()

    def hold(self, owner: type, name: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Let calls of a method wait; return what says that one does, and what lets them go."""
        held, go = asyncio.Event(), asyncio.Event()
        honest = getattr(owner, name)

        async def held_up(*args: Any, **more: Any) -> Any:
            held.set()
            await go.wait()
            return await honest(*args, **more)

        self.patch.setattr(owner, name, held_up)
        return held, go


Stage = Callable[[Bench], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def in_the_queue_of_render(bench: Bench) -> AsyncIterator[None]:
    (render,) = await bench.pipeline.start(Role.RENDER)
    await bench.start(Role.GATEWAY, Role.PREFILL, Role.DECODE, Role.DERENDER)
    await render.kill()  # its heartbeat is remembered for a while, so that the model is known
    await bench.is_published("hr.v1.req.>")
    yield
    await bench.start(Role.RENDER)


@asynccontextmanager
async def rendering(bench: Bench) -> AsyncIterator[None]:
    held, go = bench.hold(FakeRenderer, "render")
    heard, honest, everybody = set[int](), Cancels._on_cancel, asyncio.Event()

    def noted(self: Cancels, received: Received) -> None:
        honest(self, received)
        if received.subject == subjects.cancel("default", bench.request_id):
            heard.add(id(self))
        if len(heard) == 1 + len(STAGES):
            everybody.set()

    bench.patch.setattr(Cancels, "_on_cancel", noted)
    await bench.start(Role.GATEWAY, *STAGES)
    jobs: list[Received] = []
    pool = pool_of(bench.pipeline)
    await bench.pipeline.broker.subscribe(subjects.job_filter(pool, Lane.RT), jobs.append)
    await bench.submit()
    await held.wait()
    yield
    await everybody.wait()
    go.set()
    await bench.ended
    assert jobs == []


@asynccontextmanager
async def in_the_queue_of_decode(bench: Bench) -> AsyncIterator[None]:
    await bench.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    await bench.is_published("hr.v1.job.>")
    yield
    await bench.start(Role.DECODE)


@asynccontextmanager
async def in_the_queue_of_prefill(bench: Bench) -> AsyncIterator[None]:
    settings = bench.pipeline.settings
    prefill = msgspec.structs.replace(settings.prefill, slots=1)
    bench.pipeline.settings = msgspec.structs.replace(settings, prefill=prefill)
    await bench.start(Role.GATEWAY, *STAGES)
    engine = bench.engines.prefill[0]
    engine.faults.hold, engine.faults.hold_from = True, 2  # no handshake
    ahead = bench.post(AHEAD)
    await engine.wait_until(lambda _: engine.num_held == 1)
    await bench.is_published("hr.v1.pf.>")
    yield
    await bench.ended
    engine.release()
    assert (await ahead).json()["choices"][0]["text"] == expected_text(AHEAD, 16)
    # A handshake and the prompt ahead: the cancelled one was not computed.
    assert engine.stats().num_local_computed_token_ids == 1 + len(AHEAD)


@asynccontextmanager
async def in_prefill(bench: Bench) -> AsyncIterator[None]:
    await bench.start(Role.GATEWAY, *STAGES)
    engine = bench.engines.prefill[0]
    engine.faults.hold, engine.faults.hold_from = True, 2  # no handshake
    await bench.submit()
    await engine.wait_until(lambda _: engine.num_held == 1)
    engine.faults.hold = False  # of what comes later
    yield


@asynccontextmanager
async def between_the_legs(bench: Bench) -> AsyncIterator[None]:
    await bench.start(Role.GATEWAY, *STAGES)
    computed, go, honest = asyncio.Event(), asyncio.Event(), PrefillService._answer

    async def slow(self: PrefillService, task: Any) -> Any:
        answer = await honest(self, task)
        if task.request_id == bench.request_id:  # and no handshake
            computed.set()
            await go.wait()
        return answer

    bench.patch.setattr(PrefillService, "_answer", slow)
    await bench.submit()
    await computed.wait()
    yield
    await bench.ended
    go.set()


@asynccontextmanager
async def pulling(bench: Bench) -> AsyncIterator[None]:
    await bench.start(Role.GATEWAY, *STAGES)
    prefill, decode = bench.engines.prefill[0], bench.engines.decode[0]
    prefill.faults.hang_pulls = True
    await bench.submit()
    await decode.wait_until(lambda stats: stats.num_running == 1)
    await prefill.wait_until(lambda _: prefill.num_held_leases == 1)
    yield
    await decode.wait_until(lambda stats: stats.num_running == 0)
    prefill.release()


@asynccontextmanager
async def decoding(bench: Bench) -> AsyncIterator[None]:
    fake = msgspec.structs.replace(bench.pipeline.settings.fake, step_s=0.002)
    bench.pipeline.settings = msgspec.structs.replace(bench.pipeline.settings, fake=fake)
    await bench.start(Role.GATEWAY, *STAGES)
    num_before = bench.engines.decode[0].stats().num_steps
    await bench.submit(max_tokens=20_000, ignore_eos=True)
    await bench.engines.decode[0].wait_until(lambda stats: stats.num_steps > num_before + 3)
    yield


@asynccontextmanager
async def derendering(bench: Bench) -> AsyncIterator[None]:
    held, go = bench.hold(DerenderService, "_feed")
    await bench.start(Role.GATEWAY, *STAGES)
    await bench.submit()
    await held.wait()
    await bench.engines.decode[0].wait_until(lambda stats: stats.num_running == 0)
    yield
    go.set()


BEFORE_DECODE = (
    in_the_queue_of_render,
    rendering,
    in_the_queue_of_decode,
    in_the_queue_of_prefill,
    in_prefill,
    between_the_legs,
)


@pytest.fixture
async def bench(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    return Bench(pipeline, client, engines, monkeypatch)


async def by_leaving(bench: Bench) -> None:
    assert bench.answering is not None
    bench.answering.cancel()
    await asyncio.gather(bench.answering, return_exceptions=True)


async def by_request(bench: Bench) -> None:
    answer = await bench.client.post(f"/requests/{bench.request_id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert bench.answering is not None
    response = await bench.answering  # at once, whatever holds the request
    if response.status_code == 200:  # its stream had begun
        assert response.text.count('"CancelledError"') == 1
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (499, 499)


@pytest.mark.parametrize("stage", [*BEFORE_DECODE, pulling, decoding], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    ("stream", "cancel"), [(True, by_leaving), (False, by_request)], ids=["stream", "whole"]
)
async def test_a_cancel_frees_everything_and_ends_the_request_once(
    bench: Bench, stage: Stage, stream: bool, cancel: Any
) -> None:
    bench.stream = stream
    async with stage(bench):
        await cancel(bench)
    assert (await bench.ended).status == "cancelled"
    await everything_is_free(bench)
    decode = bench.engines.decode[0]
    if stage in BEFORE_DECODE:  # nothing of it reached decode's engine
        assert decode.stats().num_external_cached_token_ids in (0, len(AHEAD))
    after = await bench.post("after")
    assert after.json()["choices"][0]["text"] == expected_text("after", 16)


@pytest.mark.parametrize(
    ("stream", "cancel"), [(True, by_leaving), (False, by_request)], ids=["stream", "whole"]
)
async def test_a_cancel_of_what_is_generated_already_leaves_nothing_behind(
    bench: Bench, stream: bool, cancel: Any
) -> None:
    bench.stream = stream
    async with derendering(bench):
        await cancel(bench)
    await bench.ended
    await everything_is_free(bench)
    after = await bench.post("after")
    assert after.json()["choices"][0]["text"] == expected_text("after", 16)


async def everything_is_free(bench: Bench) -> None:
    for engine in (*bench.engines.decode, *bench.engines.prefill):
        await engine.wait_until(
            lambda stats, engine=engine: (
                stats.num_running == 0 and stats.num_blocks_free == engine.info.num_blocks
            )
        )
