"""Reads an answer from `out` as the gateway does: in order, each part once, read again what was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from headrace.gateway.pace import Pace
from headrace.shared import subjects
from headrace.shared.answer import Answer
from headrace.shared.broker import Broker, Subscription
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Terminal

from .answers import DONE, Streamed
from .orders import Order

RETRY_S = 0.5


class Reader:
    """One answer as it arrives."""

    def __init__(self, broker: Broker, tenant: str, request_id: str, order: Order) -> None:
        self.streamed = Streamed(order)
        self._broker = broker
        self._subject = subjects.out(tenant, request_id)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answer = Answer(
            self._subject, replay=broker.replay, spawn=self._spawn, pace=Pace(silence_s=1.0)
        )
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen; tries again while the broker is away."""
        while self._subscription is None:
            try:
                self._subscription = await self._broker.subscribe(
                    self._subject, self._answer.receive
                )
            except BrokerError:
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def reread(self) -> None:
        """The connection was away."""
        self._answer.reread()

    async def terminal(self, until: float) -> Terminal:
        """Read to the end, at the latest `until` (Unix seconds).

        Raises: RequestError when the answer can't be had.
        """
        until_loop = asyncio.get_running_loop().time() + until - time.time()
        while True:
            for message in await self._answer.next(until_loop):
                if isinstance(message, Terminal):
                    if message.status == "ok":
                        self.streamed.event(DONE)
                    return message
                for chunk in message.chunks:
                    self.streamed.event(chunk.decode())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
