"""Answers to a connection's requests: one subscription for all of them, and a future for each."""

from __future__ import annotations

import asyncio
import itertools

from nats.aio.client import Client
from nats.aio.msg import Msg

from headrace.shared.broker.direct import Inline


class Replies:
    """nats-py has the same, with two tasks for each answer that this does without."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Msg]] = {}

    async def start(self) -> None:
        """Listen; goes on after a reconnect. Raises: what nats-py does."""
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=Inline(self._take))

    def expect(self) -> tuple[str, asyncio.Future[Msg]]:
        """Return where an answer is to be sent, and what completes with it; `forget` it at last."""
        subject = f"{self._inbox}.{next(self._numbers)}"
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = answer
        return subject, answer

    def forget(self, subject: str) -> None:
        """Wait for it no more: what comes there is dropped."""
        del self._waiting[subject]

    def _take(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)
