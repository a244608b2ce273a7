"""Two of each service; one after the other is told to end and replaced, while clients ask all the time."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import msgspec

from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from ...ports import free_port
from .conftest import STAGES, Pipeline
from .test_flow import expected_text

NUM_CLIENTS = 6
MAX_TOKENS = 100
WATCHDOG_S = 300.0
REFUSALS = ("is shutting down", "is not connected to the broker", "no worker has announced itself")
"""Of a gateway that `/ready` takes out of the balancer."""


class Clients:
    """Clients behind two gateways, as a load balancer spreads them: one that refuses is passed over."""

    def __init__(self, model: str, ports: list[int]) -> None:
        self._model = model
        self._urls = [f"http://127.0.0.1:{port}/v1/completions" for port in ports]
        self._numbers = itertools.count()
        self.answered: asyncio.Queue[int] = asyncio.Queue()
        self.stop = asyncio.Event()

    async def run(self, http: httpx.AsyncClient) -> None:
        """Ask until `stop`; every answer must be whole and right."""
        while not self.stop.is_set():
            number = next(self._numbers)
            prompt = f"question {number}"
            body = {"model": self._model, "prompt": prompt, "max_tokens": MAX_TOKENS}
            text = await self._ask(http, number, {**body, "stream": number % 2 == 1})
            assert text == expected_text(prompt, MAX_TOKENS), f"question {number}"
            self.answered.put_nowait(number)

    async def _ask(self, http: httpx.AsyncClient, number: int, body: dict[str, Any]) -> str:
        for url in itertools.islice(itertools.cycle(self._urls), number % 2, None):
            try:
                async with http.stream("POST", url, json=body) as answer:
                    content = (await answer.aread()).decode()
            except httpx.ConnectError:
                continue
            if answer.status_code == 503 and any(reason in content for reason in REFUSALS):
                continue
            assert answer.status_code == 200, content
            return text_of(content, streamed=body["stream"])
        raise AssertionError("unreachable")


def text_of(content: str, *, streamed: bool) -> str:
    """Return the text of an answer that came to its end."""
    if not streamed:
        return str(json.loads(content)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in content.splitlines() if line]
    assert events[-1] == "[DONE]", content
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def with_port(settings: Settings) -> Settings:
    """Return settings of a gateway on a free port."""
    gateway = msgspec.structs.replace(settings.gateway, port=free_port())
    return msgspec.structs.replace(settings, gateway=gateway)


async def test_a_rolling_restart_of_every_service_under_load_fails_no_request(
    pipeline: Pipeline,
) -> None:
    fake = msgspec.structs.replace(pipeline.settings.fake, step_s=0.002)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, fake=fake)
    edges = [with_port(pipeline.settings) for _ in range(2)]
    running = [(edge, *await pipeline.start(Role.GATEWAY, settings=edge)) for edge in edges]
    for role in STAGES * 2:
        running.append((pipeline.settings, *await pipeline.start(role)))
    clients = Clients(pipeline.settings.model.served_name, [e.gateway.port for e in edges])

    async def roll() -> None:
        for settings, service in running:
            await service.drain()
            await pipeline.start(service.role, settings=settings)
            while not clients.answered.empty():
                clients.answered.get_nowait()
            for _ in range(NUM_CLIENTS):  # each restart is under load
                await clients.answered.get()
        clients.stop.set()

    async with (
        httpx.AsyncClient(timeout=WATCHDOG_S, trust_env=False) as http,
        asyncio.timeout(WATCHDOG_S),
        asyncio.TaskGroup() as group,
    ):
        for _ in range(NUM_CLIENTS):
            group.create_task(clients.run(http))
        group.create_task(roll())
