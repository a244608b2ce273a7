"""One NATS connection that outlives the broker, with nats-py's errors turned into ours.

Every wait here also ends when the connection is lost or the broker denies the subject; nats-py alone would
let both run into their timeout.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nats import errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from headrace.shared.broker import tls
from headrace.shared.broker.denials import Denials
from headrace.shared.broker.direct import DirectClient
from headrace.shared.broker.inboxes import Inbox, Inboxes
from headrace.shared.broker.message import status_of
from headrace.shared.broker.outage_log import OutageLog
from headrace.shared.broker.replies import Replies
from headrace.shared.errors import BrokerError
from headrace.shared.settings import BrokerSettings
from headrace.shared.tasks import spawn

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.2
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 20
PENDING_BYTES = 64 * 2**20  # before a publish waits for the socket

NO_RESPONDERS = "503"


class ConnectionLostError(BrokerError):
    """The connection broke while the answer was awaited; the operation may or may not have happened."""


class DeniedError(BrokerError):
    """The user that this process connects as may not do this."""


class NoResponderError(BrokerError):
    """Nobody listens on the subject: no subscriber, no stream, or no consumer."""


class _Client(DirectClient):
    """nats-py's client, without a fault: a PONG for which nobody waits any more ends its read loop.

    Then the connection is deaf, and takes a minute to notice. So it is after each flush that was cancelled, and
    after each one that ran into nats-py's timeout because the broker was away.
    """

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


class Connection:
    """One of a process's two connections."""

    def __init__(
        self,
        label: str,
        on_lost: Callable[[], None],
        on_back: Callable[[], None],
        on_closed: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`on_closed` is told why, when the broker has closed the connection for good.

        `clock` spaces the lines about an outage, or about what was dropped; None: the event loop's.
        """
        self._label = label
        self._log = OutageLog(label, clock or asyncio.get_running_loop().time)
        self._url = ""
        self._on_lost = on_lost
        self._on_back = on_back
        self._on_closed = on_closed
        self._nc = _Client()
        self._replies = Replies(self._nc)
        self._inboxes = Inboxes(self._nc)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._denials = Denials()
        self._refused = (
            asyncio.Event()
        )  # credentials, or the broker's own, before the first connect
        self._distrust = ""  # why the broker itself was refused
        self._opened = False
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, settings: BrokerSettings, user: str, inbox_prefix: str) -> None:
        """Connect, waiting for the broker to appear.

        Raises: BrokerError when the broker refuses the credentials, or does not prove who it is; SettingsError.
        """
        context = tls.context_of(settings)
        self._opened = True
        self._url = settings.shown_url
        connecting = asyncio.create_task(
            self._nc.connect(
                servers=[url.strip() for url in settings.url.split(",")],
                name=self._label,
                user=user or None,
                password=settings.password or None,
                tls=context,
                inbox_prefix=inbox_prefix,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # fractions work
                ping_interval=PING_INTERVAL_S,
                pending_size=PENDING_BYTES,
                error_cb=self._error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
            )
        )
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait({connecting, refused}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                if self._distrust:
                    raise BrokerError(f"{self._url} is not trusted: {self._distrust}")
                raise BrokerError(
                    f"{self._url} refuses user {user or '(none)'!r}: set broker.user and broker.password"
                )
            await connecting
            await self._replies.start()
            self._log.reached()
        except (errors.Error, OSError, ValueError) as error:
            raise BrokerError(f"cannot connect to {self._url}: {error}") from error
        finally:
            refused.cancel()
            while (
                not connecting.done()
            ):  # asyncio.wait_for, below it, may swallow a cancel (CPython 3.11)
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=CANCEL_AGAIN_S)
            await asyncio.gather(connecting, refused, return_exceptions=True)

    @property
    def is_connected(self) -> bool:
        """Whether the socket is up now."""
        return self._nc.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether this connection will never come back."""
        return self._closing or self._nc.is_closed

    @property
    def server_version(self) -> str:
        """The broker's version, as `2.15.1`."""
        found = re.search(r"\d+(\.\d+)*", str(self._nc.connected_server_version))
        return found[0] if found else ""

    @property
    def max_payload(self) -> int:
        """The broker's limit for one message, in bytes."""
        return self._nc.max_payload

    def new_inbox(self) -> str:
        """Return a subject on which nobody else listens."""
        return self._nc.new_inbox()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Hand one message to the socket. Raises: BrokerError."""
        if not self._nc.is_connected:
            # nats-py would keep it and send it before the receivers are back: lost without an error.
            raise ConnectionLostError(f"{subject}: not connected to the broker")
        try:
            await self._nc.publish(subject, payload, reply, dict(headers) if headers else None)
        except errors.Error as error:
            raise BrokerError(f"{subject}: {_text(error)}") from error

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """Return the first answer.

        Raises: NoResponderError, DeniedError, ConnectionLostError, or BrokerError on timeout.
        """
        denied, lost = self._denials.expect(subject), self._lost
        inbox, answer = self._replies.expect()
        try:
            await self.publish(subject, payload, reply=inbox, headers=headers)
            waiting: set[asyncio.Future[Any]] = {answer, denied, lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._replies.forget(inbox)
            self._denials.forget(subject, denied)
        if answer.done():
            message = answer.result()
            if status_of(message) == NO_RESPONDERS:
                raise NoResponderError(f"nobody listens on {subject}")
            return message
        if denied.done():
            raise DeniedError(f"{self._label} may not publish to {subject}")
        if lost.done():
            raise ConnectionLostError(f"{subject}: the connection broke before the answer")
        raise BrokerError(f"{subject}: no answer within {timeout_s:g} s")

    async def pull(
        self, subject: str, payload: bytes, *, timeout_s: float, give_back: Callable[[Msg], None]
    ) -> Msg | None:
        """Publish with an inbox of its own, and return the one message that comes to it, or None.

        A message that comes after the caller has left goes to `give_back`. The inbox is withdrawn at once then, so
        that the broker finds nobody waiting there and keeps the message for somebody else.
        """
        denied, lost = self._denials.expect(subject), self._lost
        inbox: Inbox | None = None
        is_answered = False
        try:
            inbox = await self._inboxes.get(subject)
            reply, answer = inbox.expect(give_back)
            await self.publish(subject, payload, reply=reply)
            waiting: set[asyncio.Future[Any]] = {answer, denied, lost}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if denied.done():
                raise DeniedError(f"{self._label} may not publish to {subject}")
            is_answered = answer.done()
            return answer.result() if is_answered else None
        except errors.Error as error:
            raise BrokerError(f"{subject}: {_text(error)}") from error
        finally:
            self._denials.forget(subject, denied)
            if inbox is not None and not (is_answered and self._inboxes.put(subject, inbox)):
                if not is_answered:
                    inbox.leave()
                spawn(self._withdraw(inbox), self._tasks)

    async def collect(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        is_last: Callable[[Msg], bool],
    ) -> list[Msg]:
        """Publish with an inbox, and return all that comes to it, up to and with the last.

        Raises: BrokerError when the last did not come within `timeout_s`.
        """
        messages: list[Msg] = []
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def receive(message: Msg) -> None:
            messages.append(message)
            if is_last(message) and not finished.done():
                finished.set_result(None)

        denied = self._denials.expect(subject)
        inbox = self._nc.new_inbox()
        subscription = await self.subscribe(inbox, receive, wait_until_registered=False)
        try:
            await self.publish(subject, payload, reply=inbox)
            await asyncio.wait(
                {finished, denied, self._lost},
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if denied.done():
                raise DeniedError(f"{self._label} may not publish to {subject}")
            if not finished.done():
                raise BrokerError(f"{subject}: no complete answer within {timeout_s:g} s")
            return messages
        finally:
            self._denials.forget(subject, denied)
            await self.drop(subscription)

    async def subscribe(
        self,
        subject: str,
        receive: Callable[[Msg], Awaitable[None]],
        *,
        queue: str = "",
        wait_until_registered: bool = True,
    ) -> NatsSubscription:
        """Subscribe; the broker knows of it when this returns.

        Raises: DeniedError when the user may not, BrokerError when the broker does not answer.
        """
        denied = self._denials.expect(subject)
        try:
            subscription = await self._nc.subscribe(subject, queue, receive)
            if wait_until_registered:
                try:
                    await self.flush()
                except BaseException:
                    await self.drop(subscription)  # the caller gets none, so it must not live on
                    raise
        except errors.Error as error:
            raise BrokerError(f"{subject}: {_text(error)}") from error
        finally:
            self._denials.forget(subject, denied)
        if denied.done():
            await self.drop(subscription)
            raise DeniedError(f"{self._label} may not subscribe to {subject}")
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        """End a subscription; what has arrived is still handled."""
        if not self._nc.is_connected:
            await self.drop(subscription)
            return
        try:
            # As in `flush`: drain's own PING overtakes its UNSUB, and a message in between would be dropped.
            await self._nc._send_unsubscribe(subscription._id)
            await self.flush()
            await subscription.drain()  # type: ignore[no-untyped-call]
        except (errors.Error, BrokerError, OSError) as error:
            logger.debug("unsubscribe: %s", error, extra={"action": "unsubscribe_failed"})
            await self.drop(subscription)

    async def flush(self) -> None:
        """Return when the broker has read all that was written.

        Raises: BrokerError, at once when the connection breaks meanwhile.
        """
        # nats-py writes a PING past what it still holds back, so the first one proves nothing.
        for _ in range(2):
            flushed = asyncio.ensure_future(self._nc.flush())
            try:
                waiting: set[asyncio.Future[Any]] = {flushed, self._lost}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not flushed.done():
                    raise ConnectionLostError("flush: the connection broke before the answer")
                flushed.result()
            except (errors.Error, OSError) as error:
                raise BrokerError(f"flush: {_text(error)}") from error
            finally:
                flushed.cancel()

    async def close(self) -> None:
        """Flush and close, for good."""
        if self._closing:
            return
        self._closing = True
        try:
            if self._nc.is_connected:
                await self.flush()
        except BrokerError as error:
            logger.warning("closing without a flush: %s", error, extra={"action": "flush_failed"})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._opened:
            await self._nc.close()

    async def _withdraw(self, inbox: Inbox) -> None:
        """Tell the broker first and forget it here last: what is under way must still find its callback."""
        subscription = inbox.subscription
        if subscription is None:
            return
        try:
            if self._nc.is_connected:
                await self._nc._send_unsubscribe(subscription._id)
                await self.flush()
        except BrokerError as error:
            logger.debug("pull not withdrawn: %s", error, extra={"action": "withdraw_failed"})
        finally:
            await self.drop(subscription)

    async def drop(self, subscription: NatsSubscription) -> None:
        """End a subscription at once; the broker is told, and not waited for."""
        try:
            await subscription.unsubscribe()
        except errors.Error as error:
            logger.debug("already gone: %s", error, extra={"action": "unsubscribe_failed"})

    async def _error(self, error: Exception) -> None:
        text = _text(error)
        if self._denials.heard(text):
            pass  # whoever asked says so
        elif "authorization violation" in text.lower():
            self._refused.set()
        elif distrust := tls.trouble_of(error):
            self._distrust = distrust
            self._refused.set()
        if isinstance(error, errors.SlowConsumerError):
            self._log.dropped(error.subject)
        elif isinstance(error, (OSError, errors.Error)) and not self._nc.is_connected:
            self._log.unreachable(self._url, text)
        elif isinstance(error, (errors.Error, OSError)):
            logger.warning(
                "broker: %s", text, extra={"action": "broker_error", "connection": self._label}
            )
        else:  # a handler's own
            logger.error(
                "a handler failed: %s",
                text,
                exc_info=error,
                extra={"action": "handler_failed", "connection": self._label},
            )

    async def _disconnected(self) -> None:
        if not self._closing:
            logger.warning(
                "connection lost", extra={"action": "disconnected", "connection": self._label}
            )
        self._lost.set_result(None)
        self._lost = asyncio.get_running_loop().create_future()
        self._on_lost()

    async def _reconnected(self) -> None:
        self._log.reached()
        logger.info(
            "connection is back", extra={"action": "reconnected", "connection": self._label}
        )
        self._on_back()

    async def _closed(self) -> None:
        if not self._closing:
            self._on_closed(_text(self._nc.last_error or errors.ConnectionClosedError()))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
