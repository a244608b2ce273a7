"""A gateway that reads too slowly: what it missed of an answer, it reads again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received, stored
from headrace.shared.broker.connection import _Client
from headrace.shared.messages import Chunk, Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.subjects import Role

from ...conftest import Serve
from .conftest import STAGES, Pipeline
from .test_faults import completion, slow, sse, text_of
from .test_flow import expected_text

MIB = 2**20
MAX_PENDING = 1 * MIB
BETWEEN = 16 * MIB  # more than the sockets of both sides hold
REQUEST_ID = "r-slow"
OUT = subjects.out("default", REQUEST_ID)
WATCHDOG_S = 60.0
MORE = {"max_tokens": 1_000, "ignore_eos": True}

HASTY = f"""
max_payload: {MAX_PENDING}
max_pending: {MAX_PENDING}
feature_flags {{ js_ack_fc_v2: false }}
jetstream {{ store_dir: $HEADRACE_NATS_STORE, max_memory_store: 2GB, max_file_store: 50GB }}
"""


@pytest_asyncio.fixture
async def nats_server(serve: Serve, tmp_path: Path) -> NatsServer:
    """A server of this test's own, in place of the session's: it soon loses patience with a reader."""
    config = tmp_path / "hasty.conf"
    config.write_text(HASTY)
    return await serve(NatsServer(tmp_path / "nats", config=config))


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> list[Broker]:
    """The brokers of the gateways of this test, as they see it."""
    connected: list[Broker] = []
    connect = Broker.connect

    async def note(*args: Any, **more: Any) -> Broker:
        broker = await connect(*args, **more)
        if more["role"] is Role.GATEWAY:
            connected.append(broker)
        return broker

    monkeypatch.setattr(Broker, "connect", note)
    return connected


def reading_of(broker: Broker) -> asyncio.ReadTransport:
    """Return the socket on which the answers come."""
    return broker._data._nc._transport._io_writer.transport  # type: ignore


async def end_of_answer(broker: Broker) -> asyncio.Event:
    """Return what is set with the answer's terminal."""
    ended = asyncio.Event()

    def hear(received: Received) -> None:
        if isinstance(wire.decode(received.payload, Chunk | Terminal), Terminal):
            ended.set()

    await broker.subscribe(OUT, hear)
    return ended


async def test_a_gateway_that_the_broker_throws_out_reads_the_answer_again(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    gateways: list[Broker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As it is to the real limit.
    monkeypatch.setitem(stored.read_batches.__kwdefaults__, "max_bytes", MAX_PENDING // 4)
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = completion(pipeline, "thrown out", stream=True, **MORE)
    async with (
        asyncio.timeout(WATCHDOG_S),
        client.stream(
            "POST", "/v1/completions", json=request, headers={"X-Request-Id": REQUEST_ID}
        ) as answer,
    ):
        events = sse(answer.aiter_lines())
        text = text_of(await anext(events))
        reading = reading_of(gateways[0])
        reading.pause_reading()
        first = wire.decode((await pipeline.broker.replay(OUT))[0].payload, Chunk)
        again = wire.encode(msgspec.structs.replace(first, chunks=(bytes(64 * 1024),)))
        for _ in range(BETWEEN // len(again)):
            await pipeline.broker.publish(OUT, again)
        await pipeline.broker._data.flush()
        reading.resume_reading()
        async for event in events:
            text += text_of(event)
    assert gateways[0].num_losses >= 1
    assert text == expected_text("thrown out", MORE["max_tokens"], ignore_eos=True)


async def test_a_gateway_that_falls_behind_drops_nothing(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    gateways: list[Broker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscribe = _Client.subscribe

    async def with_a_short_queue(self: _Client, subject: str, *args: Any, **more: Any) -> Any:
        if subject == OUT and self is gateways[0]._data._nc:
            more["pending_msgs_limit"] = 2
        return await subscribe(self, subject, *args, **more)

    monkeypatch.setattr(_Client, "subscribe", with_a_short_queue)
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, *STAGES)
    request = completion(pipeline, "fell behind", stream=True, **MORE)
    ended = await end_of_answer(pipeline.broker)
    with caplog.at_level(logging.ERROR, logger="headrace.shared.broker"):
        async with (
            asyncio.timeout(WATCHDOG_S),
            client.stream(
                "POST", "/v1/completions", json=request, headers={"X-Request-Id": REQUEST_ID}
            ) as answer,
        ):
            events = sse(answer.aiter_lines())
            text = text_of(await anext(events))
            reading = reading_of(gateways[0])
            reading.pause_reading()
            await ended.wait()
            reading.resume_reading()
            async for event in events:
                text += text_of(event)
    assert "slow_consumer" not in {getattr(record, "action", "") for record in caplog.records}
    assert text == expected_text("fell behind", MORE["max_tokens"], ignore_eos=True)
