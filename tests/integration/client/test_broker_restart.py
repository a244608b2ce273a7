"""What a client waits for comes, though the broker was killed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headrace.client import Client, Part, Result, answers
from headrace.client.answers import Pace
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Chunk, Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings

RES = subjects.res("default", "r1")
OUT = subjects.out("default", "r1")
ANSWER = Terminal(request_id="r1", seq=0, status="ok", http_status=200, body=b'{"id": "x"}')


@pytest_asyncio.fixture
async def pipeline(own_server: NatsServer) -> AsyncIterator[Broker]:
    """What declares the streams, and answers."""
    broker = await Broker.connect(BrokerSettings(url=own_server.url), role="test", name="pipeline")
    yield broker
    await broker.close()


async def test_a_result_from_before_is_there_after_it(
    own_server: NatsServer, pipeline: Broker
) -> None:
    async with Client(own_server.url) as client:
        await pipeline.publish_durable(RES, wire.encode(ANSWER), message_id="1")
        own_server.kill()
        await own_server.restart()
        assert (await client.result("r1", 60)).json() == {"id": "x"}


async def test_a_result_that_is_there_already_is_not_waited_for(
    own_server: NatsServer, pipeline: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "Pace", lambda: Pace(silence_s=1e6, max_silence_s=1e6))
    async with Client(own_server.url) as client:
        for subject, request_id in ((RES, "r1"), (subjects.out("default", "r2"), "r2")):
            payload = wire.encode(msgspec.structs.replace(ANSWER, request_id=request_id))
            await pipeline.publish_durable(subject, payload, message_id=request_id)
            assert (await client.result(request_id, 60)).request_id == request_id


async def test_a_result_of_after_it_comes_to_who_waited_before(
    own_server: NatsServer, pipeline: Broker
) -> None:
    async with Client(own_server.url) as client:
        waiting = asyncio.create_task(client.result("r1", 60))
        async with asyncio.timeout(60):
            assert client._answers is not None
            while not client._answers._live:  # noqa: ASYNC110 - it waits for the event loop alone
                await asyncio.sleep(0)
        own_server.kill()
        await own_server.restart()
        await pipeline.publish_durable(RES, wire.encode(ANSWER), message_id="1")
        assert (await waiting).json() == {"id": "x"}


async def test_what_was_submitted_before_is_there_after_it(
    own_server: NatsServer, pipeline: Broker
) -> None:
    async with Client(own_server.url) as client:
        await client.submit({"model": "m"}, request_id="r1")
        own_server.kill()
        await own_server.restart()
        kept = await pipeline.last(subjects.req("default", "m", subjects.Lane.STD))
        assert kept is not None
        assert kept.headers["Hr-Request-Id"] == "r1"


async def test_a_stream_goes_on_behind_what_was_read_of_it(
    own_server: NatsServer, pipeline: Broker
) -> None:
    def chunk(seq: int) -> bytes:
        return wire.encode(Chunk(request_id="r1", seq=seq, chunks=(b"%d" % seq,)))

    async with Client(own_server.url) as client:
        stream = client.stream("r1", timeout_s=60)
        await pipeline.publish(OUT, chunk(0))
        first = await anext(stream)
        own_server.kill()
        await own_server.restart()
        # The memory stream is gone; whoever answers publishes again what it has, from the start.
        for seq in range(3):
            await pipeline.publish(OUT, chunk(seq))
        end = Terminal(request_id="r1", seq=3, status="ok", http_status=200)
        await pipeline.publish_durable(OUT, wire.encode(end), message_id="end")
        rest = [part async for part in stream]
    assert isinstance(rest.pop(), Result)
    assert [part.seq for part in [first, *rest] if isinstance(part, Part)] == [0, 1, 2]


async def test_who_waits_is_told_when_the_client_is_closed(own_server: NatsServer) -> None:
    async with Client(own_server.url) as client:
        waiting = asyncio.create_task(client.result("r1", 3600))
        async with asyncio.timeout(60):
            assert client._answers is not None
            while not client._answers._live:  # noqa: ASYNC110 - it waits for the event loop alone
                await asyncio.sleep(0)
    with pytest.raises(BrokerError, match="closed"):
        await asyncio.wait_for(waiting, 60)
