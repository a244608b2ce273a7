"""The pipeline of `tests/integration/pipeline`, and a client of its broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.client import Client
from headrace.decode import engine as decode_engines
from headrace.engine.fake_engine import FakeDecodeEngine
from headrace.engine.interface import DecodeOutput
from headrace.shared.settings import EngineKind, Settings

from ..pipeline.conftest import Pipeline, pipeline, settings
from ..pipeline.test_flow import expected_text

__all__ = ["Pipeline", "expected_text", "pipeline", "settings"]


@pytest_asyncio.fixture
async def client(settings: Settings) -> AsyncIterator[Client]:
    async with Client(settings.broker) as client:
        yield client


class Engine(FakeDecodeEngine):
    """A fake engine that tells how many sequences are in it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.num_started = 0
        self.num_running = 0
        self.max_running = 0
        self._counted = asyncio.Event()

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[DecodeOutput]:
        self._count(1)
        try:
            async with contextlib.aclosing(super().generate(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._count(-1)

    async def until_running(self, count: int) -> None:
        """Return when so many sequences are in the engine."""
        async with asyncio.timeout(60):
            while self.num_running != count:
                self._counted.clear()
                await self._counted.wait()

    async def until_started(self, count: int) -> None:
        """Return when so many sequences have begun since the engine's start."""
        async with asyncio.timeout(60):
            while self.num_started < count:
                self._counted.clear()
                await self._counted.wait()

    def _count(self, change: int) -> None:
        self.num_started += change > 0
        self.num_running += change
        self.max_running = max(self.max_running, self.num_running)
        self._counted.set()


class Engines(list[Engine]):
    """The decode engines that this test's services have built."""

    hold = False  #: whether the next one holds its requests


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    built = Engines()

    def build(settings: Settings, engine: EngineKind) -> Engine:
        built.append(Engine(settings))
        built[-1].faults.hold = built.hold
        return built[-1]

    monkeypatch.setattr(decode_engines, "build", build)
    return built


def completion(pipeline: Pipeline, prompt: str, **more: Any) -> dict[str, Any]:
    """Return a body of the completions endpoint."""
    model = pipeline.settings.model.served_name
    return {"model": model, "prompt": prompt, "max_tokens": 16, **more}


async def submit(client: Client, body: Any, **more: Any) -> str:
    """Submit to the completions endpoint."""
    return await client.submit(body, endpoint="completions", **more)


def with_decode(pipeline: Pipeline, **changes: Any) -> Settings:
    """Return the pipeline's settings with some of decode's changed."""
    decode = msgspec.structs.replace(pipeline.settings.decode, **changes)
    return msgspec.structs.replace(pipeline.settings, decode=decode)
