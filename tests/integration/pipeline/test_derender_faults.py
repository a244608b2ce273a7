"""What goes wrong in derender with one answer ends no other, and leaves none without an end."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headrace.derender.handler import StreamHandler
from headrace.derender.service import DerenderService
from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import OpenStream
from headrace.shared.subjects import Role

from .conftest import STAGES, Engines, Pipeline
from .test_faults import completion
from .test_flow import expected_text

WATCHDOG_S = 60.0


async def test_an_end_that_no_check_foresaw_is_an_error_and_not_a_wait_for_the_deadline(
    pipeline: Pipeline, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: StreamHandler, *args: Any) -> Any:
        raise ArithmeticError("a parser's own fault")

    monkeypatch.setattr(StreamHandler, "close", close)
    await pipeline.start(Role.GATEWAY, *STAGES)
    async with asyncio.timeout(WATCHDOG_S):
        answer = await client.post("/v1/completions", json=completion(pipeline, "faulty end"))
    assert answer.status_code == 500
    assert "made derender fail" in answer.json()["error"]["message"]


async def test_an_answer_that_can_not_be_begun_anew_after_an_outage_moves_and_keeps_no_other_waiting(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two is refused once, as it is made again; both get their whole text."""
    replays: list[DerenderService] = []
    serve, opened = DerenderService.serve, DerenderService._opened
    opened_ids: list[str] = []
    num_open: list[int] = []
    both_open = asyncio.Event()

    async def noted(self: DerenderService, stop: asyncio.Event) -> None:
        replays.append(self)
        await serve(self, stop)

    async def refused_once(self: DerenderService, request: OpenStream) -> StreamHandler:
        opened_ids.append(request.job.request_id)
        if len(opened_ids) == 3:
            raise EngineRequestError("not this one")
        stream = await opened(self, request)
        num_open.append(1)
        if len(num_open) == 2:
            both_open.set()
        return stream

    monkeypatch.setattr(DerenderService, "serve", noted)
    monkeypatch.setattr(DerenderService, "_opened", refused_once)
    await pipeline.start(Role.GATEWAY, *STAGES)
    prompts = ("one", "two")
    async with asyncio.timeout(WATCHDOG_S):
        asking = [
            asyncio.create_task(client.post("/v1/completions", json=completion(pipeline, prompt)))
            for prompt in prompts
        ]
        await both_open.wait()
        await replays[0]._replay()
        assert opened_ids[2:4] == opened_ids[:2]  # both were begun anew, or it was tried
        for engine in held.decode:
            engine.release()
        texts = [(await each).json()["choices"][0]["text"] for each in asking]
    assert texts == [expected_text(prompt, 16) for prompt in prompts]
