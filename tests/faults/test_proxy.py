"""The proxy of the fault harness, on a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from headrace.shared.broker import Broker
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings

from .proxy import Proxy, Rule, Splitter

SUBJECT = "hr.v1.kv.somebody"


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[Proxy]:
    proxy = Proxy(int(nats_server.url.rpartition(":")[2]))
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest.fixture
async def behind(proxy: Proxy) -> AsyncIterator[Broker]:
    broker = await Broker.connect(BrokerSettings(url=proxy.url), role="test", name="behind")
    yield broker
    await broker.close()


def rule(action: str, count: int) -> Rule:
    return Rule(action, "hr.v1.kv.", count, 1.0, 0.05, time.monotonic() + 60)  # type: ignore[arg-type]


async def received_after(
    proxy: Proxy, behind: Broker, broker: Broker, sent: list[bytes]
) -> list[bytes]:
    """Publish to the process behind the proxy, and a last message that no rule hits."""
    got: list[bytes] = []
    ended = asyncio.Event()
    await behind.subscribe(SUBJECT, lambda message: got.append(message.payload))
    await behind.subscribe("hr.v1.frames.somebody", lambda _: ended.set())
    for payload in sent:
        await broker.publish(SUBJECT, payload)
    await broker.publish("hr.v1.frames.somebody", b"")
    await ended.wait()
    return got


async def test_without_a_rule_everything_comes_once(
    proxy: Proxy, behind: Broker, broker: Broker
) -> None:
    sent = [b"a", b"\r\nMSG hr.v1.kv.x 1 3\r\n", b"x" * 300_000]
    assert await received_after(proxy, behind, broker, sent) == sent


async def test_dropped_messages_do_not_come(proxy: Proxy, behind: Broker, broker: Broker) -> None:
    proxy.add(rule("drop", 2), seed=0)
    assert await received_after(proxy, behind, broker, [b"a", b"b", b"c"]) == [b"c"]


async def test_repeated_messages_come_twice(proxy: Proxy, behind: Broker, broker: Broker) -> None:
    proxy.add(rule("repeat", 1), seed=0)
    assert await received_after(proxy, behind, broker, [b"a", b"b"]) == [b"a", b"a", b"b"]


async def test_a_delayed_message_is_overtaken(proxy: Proxy, behind: Broker, broker: Broker) -> None:
    got: list[bytes] = []
    both = asyncio.Event()

    def receive(payload: bytes) -> None:
        got.append(payload)
        if len(got) == 2:
            both.set()

    await behind.subscribe(SUBJECT, lambda message: receive(message.payload))
    proxy.add(rule("delay", 1), seed=0)
    await broker.publish(SUBJECT, b"first")
    await broker.publish(SUBJECT, b"second")
    await both.wait()
    assert got == [b"second", b"first"]


async def test_a_cut_connection_comes_back(proxy: Proxy, behind: Broker) -> None:
    back = asyncio.Event()

    async def on_reconnect() -> None:
        back.set()

    behind.on_reconnect(on_reconnect)
    proxy.cut()
    proxy.let_in()
    await back.wait()
    assert behind.is_connected


def test_messages_are_found_however_the_bytes_were_cut() -> None:
    stream = b'INFO {"a":1}\r\nMSG s.a 1 5\r\nab\r\nc\r\nHMSG s.b 2 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPING\r\n'
    for size in range(1, len(stream) + 1):
        splitter = Splitter()
        found = [
            message
            for at in range(0, len(stream), size)
            for message in splitter.feed(stream[at : at + size])
        ]
        assert b"".join(message.raw for message in found) == stream
        assert [message.subject for message in found] == ["", "s.a", "s.b", ""]
