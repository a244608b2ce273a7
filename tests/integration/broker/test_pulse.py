"""Pings over a real broker: a killed peer, a hung one, and a broker that restarts under both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest_asyncio

from headrace.shared import subjects
from headrace.shared.broker import Broker
from headrace.shared.nats_server import NatsServer
from headrace.shared.pulse import Asker, Pulse, answering_pings, ping_over
from headrace.shared.settings import BrokerSettings

INTERVAL_S = 0.01


class Counted:
    """Pings, and says how many of them were answered, or were not in time, and when the peer was lost."""

    def __init__(self, ask: Asker) -> None:
        self._ask = ask
        self._ends: asyncio.Queue[str] = asyncio.Queue()

    def lost(self) -> None:
        self._ends.put_nowait("lost")

    async def __call__(self, instance: str) -> None:
        try:
            await self._ask(instance)
        except Exception as error:
            self._ends.put_nowait(type(error).__name__)
            raise
        self._ends.put_nowait("answered")

    async def until(self, end: str, count: int) -> None:
        while count:
            found = await self._ends.get()
            assert end == "lost" or found != "lost"
            count -= found == end


@pytest_asyncio.fixture
async def two(
    own_server: NatsServer,
) -> AsyncIterator[tuple[Broker, Broker]]:
    """Me and a peer that answers pings."""
    settings = BrokerSettings(url=own_server.url)
    async with AsyncExitStack() as stack:
        brokers = []
        for name in ("me", "peer"):
            brokers.append(await Broker.connect(settings, role="test", name=name))
            stack.push_async_callback(brokers[-1].close)
        await stack.enter_async_context(answering_pings(brokers[1], "peer"))
        yield brokers[0], brokers[1]


async def test_a_peer_whose_connection_is_gone_is_lost(two: tuple[Broker, Broker]) -> None:
    me, peer = two
    ask = Counted(ping_over(me))
    pulse = Pulse(ask, interval_s=INTERVAL_S)
    pulse.watch("peer", ask.lost)
    await ask.until("answered", 3)
    await peer.close()
    await ask.until("lost", 1)
    assert not pulse._watched


async def test_a_peer_that_does_not_answer_is_not_lost(two: tuple[Broker, Broker]) -> None:
    me, peer = two
    await peer.subscribe(subjects.ping("hung"), lambda _: None)

    async def ask_shortly(instance: str) -> None:
        await me.request(subjects.ping(instance), b"", timeout_s=0.05)

    ask = Counted(ask_shortly)
    pulse = Pulse(ask, interval_s=INTERVAL_S)
    pulse.watch("hung", ask.lost)
    await ask.until("BrokerError", 4)
    pulse.stop()


async def test_no_live_peer_is_lost_when_the_broker_restarts(
    two: tuple[Broker, Broker], own_server: NatsServer
) -> None:
    """The peer comes back later than this process does: nobody answers its pings for a moment."""
    me, peer = two
    ask, back = Counted(ping_over(me)), asyncio.Event()
    pulse = Pulse(ask, interval_s=INTERVAL_S)
    me.on_reconnect(pulse.reconnected)

    async def on_back() -> None:
        back.set()

    me.on_reconnect(on_back)
    pulse.watch("peer", ask.lost)
    await ask.until("answered", 1)
    own_server.kill()
    held = peer._control._nc._attempt_reconnect
    let_go = asyncio.Event()

    async def late() -> None:
        await let_go.wait()
        await held()

    peer._control._nc._attempt_reconnect = late  # type: ignore[method-assign]
    await own_server.restart()
    await back.wait()
    await ask.until("NoWorkerError", 5)
    let_go.set()
    await ask.until("answered", 3)
    pulse.stop()
