"""A worker that can't do its work says so, and ends; others answer what it held."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from headrace.decode import engine as decode_engines
from headrace.engine.fake_engine import FakeDecodeEngine, FakePrefillEngine
from headrace.prefill import engine as prefill_engines
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import EngineDeadError, EngineStuckError
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Role

from .conftest import STAGES, Pipeline
from .test_flow import expected_text


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[FakeDecodeEngine]:
    """The decode engines of the services of this test, in the order of their start."""
    built: list[FakeDecodeEngine] = []

    def build(settings: Settings, engine: EngineKind) -> FakeDecodeEngine:
        built.append(FakeDecodeEngine(settings))
        return built[-1]

    monkeypatch.setattr(decode_engines, "build", build)
    return built


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[FakePrefillEngine]:
    """The prefill engines of the services of this test, in the order of their start."""
    built: list[FakePrefillEngine] = []

    def build(settings: Settings, engine: EngineKind) -> FakePrefillEngine:
        built.append(FakePrefillEngine(settings))
        return built[-1]

    monkeypatch.setattr(prefill_engines, "build", build)
    return built


@pytest.fixture
def quick(pipeline: Pipeline) -> Pipeline:
    """A stuck engine is noticed at the second look at it."""
    settings = pipeline.settings
    pipeline.settings = msgspec.structs.replace(
        settings,
        prefill=msgspec.structs.replace(settings.prefill, engine_stuck_s=2.0),
        decode=msgspec.structs.replace(settings.decode, engine_stuck_s=2.0),
    )
    return pipeline


def completion(pipeline: Pipeline, prompt: str, **more: Any) -> dict[str, Any]:
    model = pipeline.settings.model.served_name
    return {"model": model, "prompt": prompt, "max_tokens": 16, **more}


async def test_what_a_stuck_decode_engine_held_is_answered_by_another_worker(
    quick: Pipeline, client: httpx.AsyncClient, decodes: list[FakeDecodeEngine]
) -> None:
    await quick.start(Role.GATEWAY, Role.RENDER, Role.DERENDER)
    (stuck,) = await quick.start(Role.DECODE)
    decodes[0].faults.stall = True
    prompts = ["one", "two", "three"]
    asked = [
        asyncio.create_task(client.post("/v1/completions", json=completion(quick, prompt)))
        for prompt in prompts
    ]
    await decodes[0].wait_until(lambda stats: stats.num_running > 0)
    await quick.start(Role.DECODE)
    answers = await asyncio.gather(*asked)
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [expected_text(prompt, 16) for prompt in prompts]
    with pytest.raises(EngineStuckError, match="no step in 2 s"):
        await stuck.task


async def test_decode_goes_on_without_a_prefill_worker_whose_engine_is_stuck(
    quick: Pipeline, client: httpx.AsyncClient, prefills: list[FakePrefillEngine]
) -> None:
    await quick.start(Role.GATEWAY, *STAGES)
    (stuck,) = [service for service in quick.services if service.role is Role.PREFILL]
    prefills[0].faults.stall = True
    answer = await client.post("/v1/completions", json=completion(quick, "stuck"))
    assert answer.json()["choices"][0]["text"] == expected_text("stuck", 16)
    with pytest.raises(EngineStuckError):
        await stuck.task


async def test_a_worker_whose_engine_is_dead_takes_nothing_more_and_says_so_first(
    pipeline: Pipeline, decodes: list[FakeDecodeEngine]
) -> None:
    (service,) = await pipeline.start(Role.DECODE)
    states: asyncio.Queue[str] = asyncio.Queue()
    instance = pipeline.heartbeat(Role.DECODE).instance

    def note(received: Received) -> None:
        beat = wire.decode(received.payload, Heartbeat)
        if beat.instance == instance and beat.state != "ready":
            states.put_nowait(beat.state)

    await pipeline.broker.subscribe(subjects.heartbeats(), note)
    decodes[0].die()
    assert [await states.get(), await states.get()] == ["draining", "stopped"]
    with pytest.raises(EngineDeadError):
        await service.task
