"""The end of an answer, and the broker that is killed with it in its memory."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headrace.shared.answer import Answer
from headrace.shared.broker import Received
from headrace.shared.nats_server import NatsServer
from headrace.shared.subjects import Role
from headrace.shared.worker import Worker

from .conftest import STAGES, Pipeline
from .test_faults import completion
from .test_flow import events, expected_text

WATCHDOG_S = 60.0


@pytest.fixture
def nats_server(own_server: NatsServer) -> NatsServer:
    """A server of this test's own, in place of the session's."""
    return own_server


@pytest.mark.parametrize(
    ("role", "request_more", "status"),
    [
        (Role.DERENDER, {"stream": True}, 200),
        (Role.DERENDER, {}, 200),
        (Role.RENDER, {"max_tokens": 0}, 400),
    ],
    ids=["a stream", "a whole answer", "render's refusal"],
)
async def test_an_end_that_the_broker_had_acked_before_it_was_killed_reaches_the_client(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    role: Role,
    request_more: dict[str, Any],
    status: int,
) -> None:
    killed = asyncio.Event()
    publish, receive = Worker.publish_terminal, Answer.receive

    async def then_kill(self: Worker, *args: Any, **more: Any) -> None:
        await publish(self, *args, **more)
        if not killed.is_set() and self.role is role:
            nats_server.kill()
            killed.set()

    def deaf(self: Answer, received: Received) -> bool | None:
        return receive(self, received) if killed.is_set() else None

    monkeypatch.setattr(Worker, "publish_terminal", then_kill)
    monkeypatch.setattr(Answer, "receive", deaf)
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = completion(pipeline, "the end") | request_more
    asking = asyncio.create_task(client.post("/v1/completions", json=request))
    async with asyncio.timeout(WATCHDOG_S):
        await killed.wait()
        await nats_server.restart()
        answer = await asking
    assert answer.status_code == status
    if request_more.get("stream"):
        parts = [choice["text"] for event in events(answer.text) for choice in event["choices"]]
        assert "".join(parts) == expected_text("the end", 16)
    elif status == 200:
        assert answer.json()["choices"][0]["text"] == expected_text("the end", 16)
