"""Messages handed on as they are read: nats-py has a queue and a task for each subscription in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg

from headrace.shared.broker.message import Received
from headrace.shared.broker.tls import TlsClient


class Direct:
    """A subscription's callback. What has headers may have to be fetched first; what follows it then waits, too."""

    def __init__(
        self, handle: Callable[[Received], None], later: Callable[[Msg], Awaitable[None]]
    ) -> None:
        """`handle` gets what has no headers, `later` the rest; both in the order of the messages."""
        self.handle = handle
        self.func = later  # where nats-py looks for what a callable object wraps
        self.num_waiting = (
            0  # in nats-py's queue; one that it drops counts for ever, which is only slower
        )

    async def __call__(self, message: Msg) -> None:
        """Work off what waited in nats-py's queue."""
        try:
            await self.func(message)
        finally:
            self.num_waiting -= 1


class Inline:
    """A subscription's callback that gets each message as it is, at once; it does not wait."""

    def __init__(self, handle: Callable[[Msg], None]) -> None:
        self.handle = handle
        self.func = self.__call__  # as for `Direct`

    async def __call__(self, message: Msg) -> None:
        """What nats-py would call."""
        self.handle(message)


class DirectClient(TlsClient):
    """nats-py's client, which calls a `Direct` or `Inline` callback from its read loop."""

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        subscription = self._subs.get(sid)
        callback = None if subscription is None else subscription._cb
        if subscription is None or not isinstance(callback, (Direct, Inline)):
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        if isinstance(callback, Direct) and (headers or callback.num_waiting):
            callback.num_waiting += 1
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        subscription._received += 1
        try:
            if isinstance(callback, Direct):
                callback.handle(Received(subject.decode(), data, {}, reply.decode()))
            else:
                parsed = await self._process_headers(headers)
                callback.handle(self._build_message(sid, subject, reply, data, parsed))
        except Exception as error:  # as in nats-py: one handler's fault does not end the read loop
            await self._error_cb(error)
