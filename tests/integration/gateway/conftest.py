"""A gateway on a real port, at a real broker; the stages behind it are played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from headrace.gateway.pace import Pace
from headrace.gateway.service import Gateway
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, WorkQueue
from headrace.shared.messages import Cancel, Chunk, Heartbeat, Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings, GatewaySettings, Settings, WebhookSettings
from headrace.shared.subjects import Lane, Role
from headrace.shared.submission import Submission
from headrace.shared.workers import Beacon, WorkerTable

from ...polling import eventually

TIMEOUT_S = 30.0


class Stages:
    """Render, decode and derender of one model, as the gateway sees them."""

    def __init__(self, broker: Broker, model: str) -> None:
        self.broker = broker
        self.model = model
        self.cancels: asyncio.Queue[Cancel] = asyncio.Queue()

    async def start(self, stack: AsyncExitStack) -> None:
        await self.broker.declare_model(self.model)
        for role in (Role.RENDER, Role.DECODE, Role.DERENDER):
            await stack.enter_async_context(Beacon(self.broker, lambda role=role: self._beat(role)))
        subscription = await self.broker.subscribe(
            subjects.cancel_all(),
            lambda received: self.cancels.put_nowait(wire.decode(received.payload, Cancel)),
        )
        stack.push_async_callback(subscription.unsubscribe)

    def _beat(self, role: Role) -> Heartbeat:
        return Heartbeat(
            role=role,
            instance=f"{role}-{self.model}",
            model=self.model,
            contract="c",
            state="ready",
            slots=1,
            num_running=0,
            max_model_len=512,
        )

    async def take(self) -> Submission:
        """Take the next submission, and ack it."""
        queue = WorkQueue.req(self.model, Lane.RT)
        async with asyncio.timeout(2 * TIMEOUT_S):
            while (delivery := await self.broker.take(queue, wait_s=TIMEOUT_S)) is None:
                continue
        await delivery.ack()
        return Submission.from_received(
            delivery.subject, delivery.headers, delivery.payload, delivery.published
        )

    async def chunk(self, submission: Submission, seq: int, *texts: str) -> None:
        chunks = tuple(f'{{"text":"{text}"}}'.encode() for text in texts)
        await self._out(
            submission, Chunk(request_id=submission.request_id, seq=seq, chunks=chunks), f"c{seq}"
        )

    async def end(self, submission: Submission, seq: int = 0, **fields: Any) -> None:
        values = {"status": "ok", "http_status": 200} | fields
        end = Terminal(request_id=submission.request_id, seq=seq, **values)
        await self._out(submission, end, "terminal")

    async def end_kept(self, submission: Submission, seq: int = 0, **fields: Any) -> None:
        """End a request whose terminal is kept, as a stage does."""
        values = {"status": "ok", "http_status": 200} | fields
        end = Terminal(request_id=submission.request_id, seq=seq, **values)
        await self.broker.publish_durable(
            subjects.res(submission.tenant, submission.request_id),
            wire.encode(end),
            message_id=f"{submission.request_id}.result",
            expect_last=0,
        )
        await self._out(submission, end, "terminal")

    async def _out(self, submission: Submission, message: Chunk | Terminal, name: str) -> None:
        await self.broker.publish_durable(
            subjects.out(submission.tenant, submission.request_id),
            wire.encode(message),
            message_id=f"{submission.request_id}.{name}",
        )

    async def cancel_of(self, submission: Submission) -> Cancel:
        async with asyncio.timeout(2 * TIMEOUT_S):
            while (cancel := await self.cancels.get()).request_id != submission.request_id:
                continue
            return cancel


class RunningGateway:
    """A gateway in this process."""

    def __init__(self, port: int, stop: asyncio.Event, task: asyncio.Task[None]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.stop = stop
        self.task = task
        self.client = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S)

    def post(self, model: str, **fields: Any) -> asyncio.Task[httpx.Response]:
        headers = fields.pop("headers", None)
        body = {"model": model, "messages": [], **fields}
        return asyncio.ensure_future(
            self.client.post("/v1/chat/completions", json=body, headers=headers)
        )

    def stream(self, model: str) -> Any:
        body = {"model": model, "messages": [], "stream": True}
        return self.client.stream("POST", "/v1/chat/completions", json=body)

    async def until_ready(self, model: str) -> None:
        async def is_ready() -> bool:
            models = (await self.client.get("/ready")).json()["models"]
            return bool(models.get(model, {}).get("ready"))

        await eventually(f"{model} is ready", is_ready)


async def connected(client: httpx.AsyncClient) -> None:
    """Return when a gateway has reached the broker, of which HTTP alone tells."""

    async def is_connected() -> bool:
        return (await client.get("/v1/models")).status_code != httpx.codes.SERVICE_UNAVAILABLE

    await eventually("the gateway has reached the broker", is_connected)


@asynccontextmanager
async def running_gateway(
    broker: BrokerSettings,
    pace: Pace,
    *,
    webhooks: WebhookSettings | None = None,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway with these settings of its section, on a free port."""
    edge = GatewaySettings(port=0, **settings)
    whole = Settings(broker=broker, gateway=edge, webhooks=webhooks or WebhookSettings())
    gateway = Gateway(whole, instance="gateway-test", pace=pace)
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(gateway.run(stop, on_listening=port.set_result))
    running = RunningGateway(await port, stop, task)
    try:
        yield running
    finally:
        await running.client.aclose()
        stop.set()
        await task


@pytest.fixture
def pace() -> Pace:
    return Pace(silence_s=0.05, grace_s=0.05, cancel_interval_s=0.05)


@pytest_asyncio.fixture
async def stages(broker: Broker, slug: str) -> AsyncIterator[Stages]:
    async with AsyncExitStack() as stack:
        stages = Stages(broker, slug)
        await stages.start(stack)
        yield stages


@pytest_asyncio.fixture
async def gateway(
    broker_settings: BrokerSettings, stages: Stages, pace: Pace
) -> AsyncIterator[RunningGateway]:
    async with running_gateway(broker_settings, pace) as gateway:
        await gateway.until_ready(stages.model)
        yield gateway


@pytest.fixture
def start_gateway(pace: Pace) -> Callable[..., Any]:
    """Start another gateway: `async with start_gateway(broker_settings, **gateway_settings)`."""
    return lambda broker, **settings: running_gateway(broker, pace, **settings)


@pytest_asyncio.fixture
async def own_broker(own_server: NatsServer) -> AsyncIterator[Broker]:
    """A connection to the server that the test may break."""
    broker = await Broker.connect(BrokerSettings(url=own_server.url), role="test", name="test")
    yield broker
    await broker.close()


@pytest_asyncio.fixture
async def own_stages(own_server: NatsServer, slug: str) -> AsyncIterator[Stages]:
    """Stages at the server that the test may break; its queues hold one request each."""
    settings = BrokerSettings(url=own_server.url, max_queued_per_subject=1)
    broker = await Broker.connect(settings, role="test", name="test")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(broker.close)
        stages = Stages(broker, slug)
        await stages.start(stack)
        yield stages


@pytest_asyncio.fixture
async def own_gateway(
    own_server: NatsServer, own_stages: Stages, pace: Pace
) -> AsyncIterator[RunningGateway]:
    """A gateway at the server that the test may break."""
    settings = BrokerSettings(url=own_server.url, max_queued_per_subject=1, publish_timeout_s=0.5)
    async with running_gateway(settings, pace) as gateway:
        await gateway.until_ready(own_stages.model)
        yield gateway


@pytest_asyncio.fixture
async def own_sdk(own_gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of it."""
    async with openai.AsyncOpenAI(
        base_url=f"{own_gateway.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as sdk:
        yield sdk


@pytest_asyncio.fixture
async def table(broker: Broker) -> AsyncIterator[WorkerTable]:
    async with WorkerTable(broker) as table:
        yield table


@pytest_asyncio.fixture
async def two_tenants(
    broker_settings: BrokerSettings,
    stages: Stages,
    start_gateway: Callable[..., Any],
    slug: str,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """OpenAI's own client for each of two tenants of this test's own, at one gateway that takes files up to 3 MiB."""
    names = [f"{slug}-acme", f"{slug}-globex"]
    keys = ",".join(f"{name}:key-of-{name}" for name in names)
    async with start_gateway(broker_settings, api_keys=keys, max_file_bytes=3 * 2**20) as gateway:
        await gateway.until_ready(stages.model)
        clients = [
            openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1",
                api_key=f"key-of-{name}",
                max_retries=0,
                timeout=TIMEOUT_S,
            )
            for name in names
        ]
        yield clients[0], clients[1]
        for client in clients:
            await client.close()


@pytest.fixture
def sdk(two_tenants: tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]) -> openai.AsyncOpenAI:
    """The client of `tenant`."""
    return two_tenants[0]


@pytest.fixture
def tenant(slug: str) -> str:
    """The first of `two_tenants`."""
    return f"{slug}-acme"
