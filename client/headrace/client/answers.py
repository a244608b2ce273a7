"""The answers that somebody waits for: heard live, and read from where they are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace.client.errors import NoResultError
from headrace.shared import subjects
from headrace.shared.answer import Answer
from headrace.shared.broker import Broker, Received
from headrace.shared.errors import BrokerError, ExpiredError
from headrace.shared.messages import Chunk, Terminal
from headrace.shared.tasks import spawn


@dataclass(frozen=True, slots=True)
class Pace:
    """How soon what is kept is read again when nothing comes."""

    silence_s: float = 2.0
    max_silence_s: float = 16.0


class Reading:
    """One answer that somebody waits for."""

    def __init__(self, request_id: str, answer: Answer) -> None:
        self._request_id = request_id
        self._answer = answer

    async def next(self, until: float, timeout_s: float) -> list[Chunk | Terminal]:
        """Wait for the next messages, in order; a terminal is the last one.

        `until` is a time of the event loop's clock, in `timeout_s` from when the caller began to wait.
        Raises: NoResultError, AnswerLostError, BrokerError.
        """
        try:
            return await self._answer.next(until)
        except ExpiredError:
            raise NoResultError(
                f"request {self._request_id}: nothing came within {timeout_s:g} s"
            ) from None

    async def end(self, until: float, timeout_s: float) -> Terminal:
        """Wait for the terminal. Raises: as `next`."""
        while True:
            last = (await self.next(until, timeout_s))[-1]
            if isinstance(last, Terminal):
                return last


class Answers:
    """Reads the answers of one tenant."""

    def __init__(self, broker: Broker, tenant: str) -> None:
        self._broker = broker
        self._tenant = tenant
        self._live: set[Answer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BrokerError | None = None
        broker.on_reconnect(self._reread_all)
        self._spawn(self._fail_when_closed())

    async def aclose(self) -> None:
        """End what still reads; who waits is told."""
        self._fail(BrokerError("this client was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def reading(self, request_id: str, *, from_seq: int | None) -> AsyncIterator[Reading]:
        """Listen first, then read what is there already: so nothing falls between the two.

        `from_seq`: the first message that is wanted; None: the terminal alone. Raises: BrokerError.
        """

        async def kept(out: str) -> list[Received]:
            return await self._kept(request_id, out)

        answer = Answer(
            subjects.out(self._tenant, request_id),
            replay=kept,
            spawn=self._spawn,
            pace=Pace(),
            first_seq=from_seq,
        )
        async with AsyncExitStack() as stack:
            for subject in (answer.subject, subjects.res(self._tenant, request_id)):
                subscription = await self._broker.subscribe(subject, answer.receive)
                stack.push_async_callback(subscription.unsubscribe)
            stack.callback(answer.close)
            self._live.add(answer)
            stack.callback(self._live.discard, answer)
            answer.reread()
            if self._failure is not None:
                answer.fail(self._failure)
            yield Reading(request_id, answer)

    async def _kept(self, request_id: str, out: str) -> list[Received]:
        """Return what is kept of an answer; a result of the lanes std and bulk outlives the rest of it."""
        result = await self._broker.last(subjects.res(self._tenant, request_id))
        # The last message is cheap to ask for, and most readers wait before there is any.
        found = await self._broker.replay(out) if await self._broker.last(out) else []
        return found if result is None else [*found, result]

    async def _fail_when_closed(self) -> None:
        """No answer will come any more: nobody need wait until the time is over."""
        try:
            await self._broker.closed_for_good()
        except BrokerError as error:
            self._fail(error)

    def _fail(self, error: BrokerError) -> None:
        self._failure = error
        for answer in self._live:
            answer.fail(error)

    async def _reread_all(self) -> None:
        for answer in self._live:
            answer.reread()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return spawn(work, self._tasks)
