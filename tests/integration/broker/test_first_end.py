"""Two workers that end one request, because a broker that was killed forgot that it had an owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
import pytest_asyncio

from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import CancelledRequestError, EngineRequestError
from headrace.shared.messages import Chunk, Terminal, Timings
from headrace.shared.nats_server import NatsServer
from headrace.shared.owners import message_of
from headrace.shared.settings import BrokerSettings, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import Worker, joined, terminal_of

TENANT, REQUEST = "default", "ended-twice"
WATCHDOG_S = 60.0


class Two:
    """A render and a derender worker of one request."""

    def __init__(self, render: Worker, derender: Worker, server: NatsServer) -> None:
        self.render = render
        self.derender = derender
        self._server = server
        self.accepted = time.time()

    async def crash(self) -> None:
        """Kill the broker, start it anew, and return when both workers have done what they do then."""
        back = asyncio.Barrier(3)

        async def come_back() -> None:
            await back.wait()

        for worker in (self.render, self.derender):
            worker.broker.on_reconnect(come_back)
        self._server.kill()
        await self._server.restart()
        async with asyncio.timeout(WATCHDOG_S):
            await back.wait()

    async def cancelled(self) -> None:
        """End the request as render does."""
        error = CancelledRequestError("nobody waits")
        await self.render.publish_terminal(TENANT, Lane.RT, terminal_of(REQUEST, error))

    async def answered(self, *, epoch: int = 1, body: bytes = b"{}") -> None:
        """End it as derender does: a whole answer, or with an empty `body` a stream's."""
        terminal = Terminal(
            request_id=REQUEST,
            seq=0,
            status="ok",
            http_status=200,
            body=body,
            epoch=epoch,
            timings=Timings(accepted=self.accepted),
        )
        await self.derender.publish_terminal(TENANT, Lane.RT, terminal)

    async def failed(self, *, epoch: int) -> None:
        """End it as an owner does that lost its engine."""
        timings = Timings(accepted=self.accepted)
        error = EngineRequestError("lost")
        terminal = terminal_of(REQUEST, error, epoch=epoch, timings=timings)
        await self.derender.publish_terminal(TENANT, Lane.RT, terminal)

    async def goes_on(self, seq: int = 0) -> None:
        """Publish a part of the answer, as derender does that has not heard of an end."""
        chunk = Chunk(request_id=REQUEST, seq=seq, chunks=(b"{}",), epoch=1)
        await self.derender.outbox.publish(subjects.out(TENANT, REQUEST), wire.encode(chunk))

    async def ends(self) -> list[str]:
        """Return the status of each end that the broker has."""
        subject = subjects.out(TENANT, REQUEST)
        messages = [message_of(m) for m in await self.render.broker.replay(subject)]
        return [message.status for message in messages if isinstance(message, Terminal)]


@pytest_asyncio.fixture
async def two(own_server: NatsServer) -> AsyncIterator[Two]:
    settings = msgspec.structs.replace(Settings(), broker=BrokerSettings(url=own_server.url))
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                joined(settings, role, model="m", contract="c", slots=1, stop=asyncio.Event())
            )
            for role in (Role.RENDER, Role.DERENDER)
        ]
        yield Two(workers[0], workers[1], own_server)


@pytest.mark.parametrize("body", [b"{}", b""], ids=["a whole answer", "a stream"])
async def test_the_first_end_counts_for_render_then_for_derender(two: Two, body: bytes) -> None:
    await two.crash()
    await two.cancelled()
    await two.answered(body=body)
    assert await two.ends() == ["cancelled"]


@pytest.mark.parametrize("body", [b"{}", b""], ids=["a whole answer", "a stream"])
async def test_the_first_end_counts_for_derender_then_for_render(two: Two, body: bytes) -> None:
    await two.crash()
    await two.answered(body=body)
    await two.cancelled()
    assert await two.ends() == ["ok"]


async def test_an_end_counts_also_with_parts_of_an_answer_behind_it(two: Two) -> None:
    await two.crash()
    await two.cancelled()
    await two.goes_on()
    await two.answered(body=b"")
    assert await two.ends() == ["cancelled"]


async def test_an_end_comes_also_where_the_replica_that_is_read_lags(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.crash()
    replay, behind = two.derender.broker.replay, [0, 0, 0]

    async def lagging(subject: str) -> list[Received]:
        messages = await replay(subject)
        return messages[: behind.pop()] if behind else messages

    monkeypatch.setattr(two.derender.broker, "replay", lagging)
    await two.goes_on()
    await two.answered(body=b"")
    assert behind == []
    assert await two.ends() == ["ok"]


async def test_an_end_published_again_behind_its_parts_comes_after_another_that_is_there(
    two: Two,
) -> None:
    await two.goes_on()
    await two.answered(body=b"")
    publish_again = two.derender.outbox._publish_again
    two.derender.broker._connections.callbacks.remove(publish_again)
    await two.crash()
    await two.cancelled()
    await publish_again()
    assert await two.ends() == ["cancelled"]


async def test_an_end_published_again_comes_after_another_that_is_there(two: Two) -> None:
    await two.answered()
    publish_again = two.derender.outbox._publish_again
    two.derender.broker._connections.callbacks.remove(publish_again)
    await two.crash()
    assert await two.ends() == []
    await two.cancelled()
    await publish_again()
    assert await two.ends() == ["cancelled"]


async def test_an_end_that_a_later_owner_made_void_ends_nothing(two: Two) -> None:
    await two.crash()
    await two.failed(epoch=1)
    await two.answered(epoch=2, body=b"")
    assert await two.ends() == ["error", "ok"]


async def test_two_ends_at_once_leave_one(two: Two) -> None:
    await two.crash()
    await asyncio.gather(two.cancelled(), two.answered())
    assert len(await two.ends()) == 1
