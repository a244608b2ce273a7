"""The inboxes to which the broker sends what is pulled: each for one pull at a time, and used again.

To the broker a subscription is dear: with each that comes or goes it looks anew who hears what, on every
connection. And whoever leaves a pull must take the inbox with it: then nobody waits there, and the broker
gives the message to somebody else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from headrace.shared.broker.direct import Inline

MAX_FREE = 4


class Inbox:
    """Where one pull after the other is answered.

    A message comes with its own subject, not that of the inbox; a status with that of the pull it is about.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._subject = ""
        self._answer: asyncio.Future[Msg] | None = None
        self._give_back: Callable[[Msg], None] = lambda message: None
        self.subscription: NatsSubscription | None = None  #: None: not yet

    def expect(self, give_back: Callable[[Msg], None]) -> tuple[str, asyncio.Future[Msg]]:
        """Return where the next pull's answer is to be sent, and what completes with it.

        What comes there for nobody goes to `give_back`.
        """
        self._subject = f"{self._prefix}.{next(self._numbers)}"
        self._answer = asyncio.get_running_loop().create_future()
        self._give_back = give_back
        return self._subject, self._answer

    def leave(self) -> None:
        """Nobody waits any more: what has come, or comes yet, is given back."""
        answer, self._answer = self._answer, None
        if answer is not None and answer.done() and not answer.cancelled():
            self._give_back(answer.result())

    def receive(self, message: Msg) -> None:
        """Take one message."""
        if message.subject.startswith(self._prefix) and message.subject != self._subject:
            return  # a word about an earlier pull
        if self._answer is None or self._answer.done():
            self._give_back(message)
        else:
            self._answer.set_result(message)


class Inboxes:
    """Those of one connection, for each subject on which pulls are asked for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._free: dict[str, list[Inbox]] = {}

    async def get(self, subject: str) -> Inbox:
        """Return one that the broker knows of before it reads the pull. Raises: what nats-py does."""
        if free := self._free.get(subject):
            return free.pop()
        prefix = self._client.new_inbox()
        inbox = Inbox(prefix)
        inbox.subscription = await self._client.subscribe(f"{prefix}.*", cb=Inline(inbox.receive))
        return inbox

    def put(self, subject: str, inbox: Inbox) -> bool:
        """Keep one whose pull was answered for the next pull; return whether it is kept, and not to be withdrawn."""
        free = self._free.setdefault(subject, [])
        if len(free) >= MAX_FREE:
            return False
        free.append(inbox)
        return True
