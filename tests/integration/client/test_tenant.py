"""The client in a tenant's own account, with the deployment's `nats-server.conf`."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from headrace.cli.batch import run as batch_run
from headrace.client import Client, NoResultError, Part, Result
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received, WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Chunk, Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.served_models import Models
from headrace.shared.settings import BrokerSettings, Settings
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

from ...conftest import Serve
from ..broker import deployed


@pytest_asyncio.fixture
async def server(serve: Serve, tmp_path: Path) -> NatsServer:
    text = deployed.turned_on(deployed.CONFIG.read_text(), "acme")
    return await serve(deployed.server(tmp_path, text, {"HEADRACE_ACME_PASSWORD": "pw-acme"}))


@pytest_asyncio.fixture
async def ours(server: NatsServer) -> AsyncIterator[Broker]:
    """The pipeline's side."""
    settings = BrokerSettings(url=server.url, password="pw-admin")
    broker = await Broker.connect(settings, role="admin", name="test")
    await broker.declare_model("m")
    yield broker
    await broker.close()


def client_of(server: NatsServer, tenant: str) -> Client:
    settings = BrokerSettings(
        url=server.url, user="acme", password="pw-acme", publish_timeout_s=0.5
    )
    return Client(settings, tenant=tenant)


def end(tenant: str, request_id: str, *, seq: int = 0, body: bytes = b'{"id": "x"}') -> bytes:
    return wire.encode(
        Terminal(request_id=request_id, seq=seq, status="ok", http_status=200, body=body)
    )


async def test_a_tenant_submits_and_reads_its_result(server: NatsServer, ours: Broker) -> None:
    async with client_of(server, "acme") as client:
        request_id = await client.submit({"model": "m"})
        taken = await ours.take(WorkQueue.req("m", Lane.STD), wait_s=30)
        assert taken is not None
        found = Submission.from_received(taken.subject, taken.headers, taken.payload, now=0.0)
        assert (found.tenant, found.request_id) == ("acme", request_id)
        waiting = asyncio.create_task(client.result(request_id, 60))
        payload = end("acme", request_id)
        await ours.publish_durable(subjects.res("acme", request_id), payload, message_id="1")
        assert (await waiting).json() == {"id": "x"}
        assert (await client.result(request_id, 60)).json() == {"id": "x"}
        cancels: asyncio.Queue[Received] = asyncio.Queue()
        await ours.subscribe(subjects.cancel_all(), cancels.put_nowait)
        await client.cancel(request_id)
        heard = await asyncio.wait_for(cancels.get(), 60)
        assert heard.subject == subjects.cancel("acme", request_id)


async def test_a_tenant_reads_the_end_that_is_kept_of_an_rt_request(
    server: NatsServer, ours: Broker
) -> None:
    await ours.publish_durable(subjects.out("acme", "r1"), end("acme", "r1"), message_id="1")
    async with client_of(server, "acme") as client:
        assert (await client.result("r1", 60)).json() == {"id": "x"}


async def test_a_tenant_follows_its_stream(server: NatsServer, ours: Broker) -> None:
    async with client_of(server, "acme") as client:
        out = subjects.out("acme", "r1")
        stream = client.stream("r1", timeout_s=60)
        first = asyncio.ensure_future(anext(stream))
        async with asyncio.timeout(60):
            assert client._answers is not None
            while not client._answers._live:  # noqa: ASYNC110 - it waits for the event loop alone
                await asyncio.sleep(0)
        for seq in range(3):
            chunk = Chunk(request_id="r1", seq=seq, chunks=(b"%d" % seq,))
            await ours.publish(out, wire.encode(chunk))
        await ours.publish_durable(out, end("acme", "r1", seq=3, body=b""), message_id="end")
        *parts, result = [await first, *[part async for part in stream]]
        assert [part.json() for part in parts if isinstance(part, Part)] == [[0], [1], [2]]
        assert isinstance(result, Result)


async def test_a_tenant_reaches_nothing_of_another(server: NatsServer, ours: Broker) -> None:
    await ours.publish_durable(subjects.res("globex", "r1"), end("globex", "r1"), message_id="1")
    await ours.publish_durable(subjects.out("globex", "r1"), end("globex", "r1"), message_id="2")
    async with client_of(server, "globex") as client:
        with pytest.raises(BrokerError, match=r"hr\.v1\.req\.globex"):
            await client.submit({"model": "m"})
        with pytest.raises(NoResultError):
            await client.result("r1", 0.5)


async def test_a_batch_runs_in_a_tenants_account_that_hears_of_no_worker(
    server: NatsServer, ours: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "Models", functools.partial(Models, heard_within_s=0.1))
    batch = batch_run.Batch(
        input_file=tmp_path / "in.jsonl",
        output_file=tmp_path / "out.jsonl",
        tenant="acme",
        concurrency=2,
    )
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    batch.input_file.write_text(json.dumps({"custom_id": "a", **line}))
    settings = msgspec.structs.replace(
        Settings(), broker=BrokerSettings(url=server.url, user="acme", password="pw-acme")
    )
    with batch_run.opened(batch) as (checkpoint, num_bytes):
        session = batch_run.Session(batch, checkpoint, num_bytes)
        running = asyncio.create_task(session.run(settings))
        taken = await ours.take(WorkQueue.req("m", Lane.BULK), wait_s=30)
        assert taken is not None
        request_id = taken.headers["Hr-Request-Id"]
        payload = end("acme", request_id)
        await ours.publish_durable(subjects.res("acme", request_id), payload, message_id="1")
        await running
    assert session.code == 0
    assert json.loads(batch.output_file.read_text())["response"]["body"] == {"id": "x"}
