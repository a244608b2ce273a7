"""The broker as the services see it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from headrace.shared.broker import blobs, scoped, stored
from headrace.shared.broker.admin import Admin
from headrace.shared.broker.connection import (
    Connection,
    ConnectionLostError,
    DeniedError,
    NoResponderError,
)
from headrace.shared.broker.delivery import Delivery, nak_payload
from headrace.shared.broker.direct import Direct
from headrace.shared.broker.documents import Documents
from headrace.shared.broker.durable import (
    ATTEMPT_TIMEOUT_S,
    MESSAGE_ID_HEADER,
    RETRY_S,
    DurablePublisher,
)
from headrace.shared.broker.message import Received
from headrace.shared.broker.topology import BLOB_S, CLIENT, OUT_STREAM, Topology
from headrace.shared.broker.work_queue import LAST_RESORT_GROUP, WorkQueue
from headrace.shared.errors import (
    BrokerError,
    HeadraceError,
    NoWorkerError,
)
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import ROOT, Role
from headrace.shared.tasks import spawn

logger = logging.getLogger(__name__)

ACKS_OF_JOBS = ("$JS.ACK.HR_JOB_RT.", "$JS.ACK.HR_JOB.")
PULL_MARGIN_S = 2.0  # the broker ends a pull itself; past this it has forgotten us


class Subscription:
    """A live subscription; it survives reconnects."""

    def __init__(self, connection: Connection, inner: NatsSubscription) -> None:
        self._connection = connection
        self._inner = inner
        self._ended = False

    async def unsubscribe(self) -> None:
        """End it; what has arrived is still handled before this returns."""
        if not self._ended:
            self._ended = True
            await self._connection.unsubscribe(self._inner)

    async def drop(self) -> None:
        """End it without a word from the broker: what is on its way to it is not handled."""
        if not self._ended:
            self._ended = True
            await self._connection.drop(self._inner)


class Broker:
    """Two connections to NATS: tokens and results on one, control messages and settling on the other.

    So a heartbeat or a cancel never waits behind megabytes.
    """

    def __init__(self, settings: BrokerSettings, *, role: str, name: str) -> None:
        self._settings = settings
        self._user = settings.user or (role if settings.password else "")
        self._inbox_prefix = f"_INBOX_{re.sub(r'[^A-Za-z0-9_-]', '-', self._user or role)}"
        self._topology = Topology(settings, role)
        self._reader = scoped if role == CLIENT else stored
        ends = (self._on_lost, self._on_back, self._on_closed)
        self._data = Connection(f"{role} {name} data", *ends)
        self._control = Connection(f"{role} {name} control", *ends)
        self._durable = DurablePublisher(
            self._data, self._wait_until_ready, settings.publish_timeout_s
        )
        self._models: set[tuple[str, str]] = set()
        self._queues: set[WorkQueue] = set()
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._ready = asyncio.Event()
        self._restoring: asyncio.Task[None] | None = None
        self._declaring: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_losses = 0  #: how often a connection to the broker broke
        self.lost_at = float(
            "-inf"
        )  #: when the broker was there for the last time (`time.monotonic`)
        self.back_at = 0.0  #: when it was reached last, after a loss or at first (Unix seconds)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, settings: BrokerSettings, *, role: Role | str, name: str) -> Broker:
        """Connect and declare the streams, waiting for the broker as long as it takes.

        Raises: BrokerError when the broker refuses the user, or denies it a stream of its role.
        """
        broker = cls(settings, role=str(role), name=name)
        try:
            for connection in (broker._data, broker._control):
                await connection.open(settings, broker._user, broker._inbox_prefix)
            await broker._declare_until_done()
        except BaseException:
            await broker.close()
            raise
        broker._has_come()
        return broker

    @property
    def is_connected(self) -> bool:
        """Whether both connections are up and the streams declared."""
        return self._ready.is_set() and not self._closed and not self._failed.done()

    @property
    def is_closed(self) -> bool:
        """Whether it will never be connected again."""
        return self._closed or self._failed.done()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` each time the broker was away, once streams and consumers are declared again."""
        self._callbacks.append(callback)

    async def closed_for_good(self) -> None:
        """Never return. Raises: BrokerError when the broker ended a connection in a way that no reconnect mends."""
        await asyncio.shield(self._failed)

    @property
    def admin(self) -> Admin:
        """What operators do to streams; the broker denies it to most users."""
        return Admin(self._data, self._stored)

    async def declare_model(self, slug: str, pool: str | None = None) -> None:
        """Declare the durable consumers of one model and contract; again after each reconnect.

        `pool` is `subjects.pool` of both; None: the slug alone. Raises: BrokerError.
        """
        model = (slug, pool or slug)
        self._models.add(model)
        await self._declare(lambda: self._topology.declare_consumers(self._control, *model))

    async def declare_queue(self, queue: WorkQueue) -> None:
        """Declare a queue beside those of the model; again after each reconnect. Raises: BrokerError."""
        self._queues.add(queue)
        await self._declare(lambda: self._topology.declare_consumer(self._control, queue))

    async def _declare(self, declare: Callable[[], Awaitable[None]]) -> None:
        """Declare, again until `publish_timeout_s`: a cluster may just elect a leader."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.publish_timeout_s
        while True:
            await self._wait_until_ready(deadline - loop.time())
            try:
                return await declare()
            except DeniedError:
                raise
            except BrokerError:
                if loop.time() + RETRY_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without an ack: at most once.

        Waits `publish_timeout_s` for a broker that is away. Raises: BrokerError, PayloadTooLargeError.
        """
        blobs.check_size(subject, len(payload))
        if len(payload) > self._data.max_payload // 2:
            payload, headers = await self._check_in(subject, payload, headers, BLOB_S)
        if not self.is_connected:
            await self._wait_until_ready(self._settings.publish_timeout_s)
        await self._connection_of(subject).publish(subject, payload, headers=headers)

    async def publish_durable(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        kept_s: float | None = None,
    ) -> bool:
        """Store one message in its stream, trying again until `publish_timeout_s`.

        A payload in parts stays readable for `kept_s` seconds; None: as long as the stream keeps messages.

        Returns True when this call stored it; False when a message of this ID is already there (2 minutes
        back), or when the subject's last message is another one than `expect_last`: its stream sequence, 0 for
        none; None: whatever it is.
        Raises: QueueFullError, PayloadTooLargeError, or BrokerError when it is unknown whether it was stored.
        """
        stream = self._topology.stream_of(subject)
        if stream is None:
            raise BrokerError(f"{subject} is captured by no stream; publish it without an ack")
        payload, headers = await self._check_in(
            subject, payload, headers, stream.blob_ttl_s if kept_s is None else math.ceil(kept_s)
        )
        sequence = await self._durable.publish(
            stream.name,
            subject,
            payload,
            {**headers, MESSAGE_ID_HEADER: message_id},
            expect_last=expect_last,
        )
        return sequence is not None

    @property
    def documents(self) -> Documents:
        """What is changed by compare-and-set, one message a subject."""
        return Documents(self._data, self._durable, self._topology, self._wait_until_connected)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Ask one listener and return its answer.

        Raises: NoWorkerError when nobody listens, BrokerError on timeout, PayloadTooLargeError.
        """
        payload, headers = await self._check_in(subject, payload, None, BLOB_S)
        await self._wait_until_ready(timeout_s)
        try:
            message = await self._connection_of(subject).request(
                subject, payload, timeout_s=timeout_s, headers=headers
            )
        except NoResponderError as error:
            raise NoWorkerError(str(error)) from None
        return (await self._received(message)).payload

    async def respond(self, received: Received, payload: bytes) -> None:
        """Answer a request. Raises: BrokerError, also when no answer is awaited."""
        if not received.reply:
            raise BrokerError(f"the message on {received.subject} awaits no answer")
        payload, headers = await self._check_in(received.reply, payload, None, BLOB_S)
        await self._wait_until_ready(self._settings.publish_timeout_s)
        # On the connection that the request came on: the permission to respond is that connection's.
        connection = self._connection_of(received.subject)
        await connection.publish(received.reply, payload, headers=headers)

    async def subscribe(
        self,
        subject: str,
        handler: Callable[[Received], None],
        *,
        queue: str = "",
        is_confirmed: bool = True,
    ) -> Subscription:
        """Call `handler` with each message, one at a time and in order; it must not block.

        The broker knows of the subscription when this returns. Not `is_confirmed`: it will before it reads what is
        published afterwards on the same connection (`ctl` has one of its own), which is enough to hear the answer
        to that, and saves two round trips; that this user may not listen is only logged then. Raises: BrokerError.
        """

        async def receive(message: Msg) -> None:
            try:
                received = await self._received(message)
            except BrokerError as error:
                logger.error(
                    "message dropped, its payload can't be read: %s",
                    error,
                    extra={"action": "blob_unreadable", "subject": message.subject},
                )
                return
            handler(received)

        await self._wait_until_ready(self._settings.publish_timeout_s)
        connection = self._connection_of(subject)
        while True:
            await self._wait_until_ready(self._settings.publish_timeout_s)
            try:
                inner = await connection.subscribe(
                    subject,
                    Direct(handler, receive),
                    queue=queue,
                    wait_until_registered=is_confirmed,
                )
            except ConnectionLostError as error:
                logger.info(
                    "subscribing again: %s",
                    error,
                    extra={"action": "resubscribe", "subject": subject},
                )
                await asyncio.sleep(RETRY_S)  # the loss is noticed here a moment later
                continue
            return Subscription(connection, inner)

    async def take(
        self, queue: WorkQueue, *, wait_s: float, is_last_resort: bool = False
    ) -> Delivery | None:
        """Take one message, or return None when none came within `wait_s` seconds (0: at once).

        `is_last_resort`: only what no other take of a queue `with_last_resort` waits for.
        Any number of takes may wait at once. A take that is cancelled leaves nothing behind: what comes too
        late is given back. Raises: BrokerError when the queue was never declared, or this user may not.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        if not self._ready.is_set():
            try:
                await self._wait_until_ready(wait_s)
            except BrokerError:
                self._check_open()
                return None
        self._check_open()
        remaining = max(0.0, deadline - loop.time())
        pull: dict[str, Any] = (
            {"batch": 1, "expires": int(remaining * 1e9)}
            if remaining
            else {"batch": 1, "no_wait": True}
        )
        if queue.with_last_resort:
            pull |= {"group": LAST_RESORT_GROUP, "priority": int(is_last_resort)}
        try:
            message = await self._control.pull(
                f"$JS.API.CONSUMER.MSG.NEXT.{queue.stream}.{queue.consumer}",
                msgspec.json.encode(pull),
                timeout_s=remaining + PULL_MARGIN_S,
                give_back=self._give_back,
            )
        except DeniedError:
            raise
        except BrokerError:
            self._check_open()
            # The connection broke. Not at once: a caller that takes in a loop would keep the news from us.
            await asyncio.sleep(max(0.0, min(RETRY_S, deadline - loop.time())))
            return None
        if message is None:
            return None
        if stored.status_of(message) is None:
            return await self._delivery(queue, message)
        await self._after_status(queue, message, min(RETRY_S, deadline - loop.time()))
        return None

    async def replay(self, subject: str, *, from_seq_of: int = 0) -> list[Received]:
        """Return the captured messages of one `out` subject, in order.

        `from_seq_of`: only those from this stream sequence on (an earlier one's header `Nats-Sequence`).
        Raises: BrokerError.
        """
        await self._wait_until_ready(self._settings.publish_timeout_s)
        messages = await self._reader.read_subject(
            self._data, OUT_STREAM, subject, first_seq=from_seq_of
        )
        return [await self._stored(message) for message in messages]

    async def stored_on(self, pattern: str) -> list[Received]:
        """Return the messages that their stream holds of every subject of a pattern, in order. Raises: BrokerError."""
        stream = self._topology.stream_of(pattern)
        if stream is None:
            raise BrokerError(f"{pattern} is captured by no stream")
        await self._wait_until_ready(self._settings.publish_timeout_s)
        messages = await self._reader.read_subject(self._data, stream.name, pattern)
        return [await self._stored(message) for message in messages]

    async def last(self, subject: str) -> Received | None:
        """Return the last message that its stream holds of a subject, or None. Raises: BrokerError."""
        stream = self._topology.stream_of(subject)
        if stream is None:
            raise BrokerError(f"{subject} is captured by no stream")
        await self._wait_until_ready(self._settings.publish_timeout_s)
        message = await self._reader.read_last(self._data, stream.name, subject)
        return None if message is None else await self._stored(message)

    async def put_blob(self, data: bytes, *, ttl_s: int = BLOB_S) -> str:
        """Store up to 64 MB for `ttl_s` seconds and return a ref to it.

        Raises: PayloadTooLargeError, QueueFullError, BrokerError.
        """
        return await blobs.put(
            self._store_part,
            data,
            ttl_s=ttl_s,
            part_bytes=min(blobs.PART_BYTES, self._data.max_payload // 2),
        )

    async def get_blob(self, ref: str) -> bytes:
        """Return what a ref stands for. Raises: BrokerError, also when it is past its age limit."""
        await self._wait_until_ready(self._settings.publish_timeout_s)
        return await blobs.get(self._data, ref)

    async def close(self) -> None:
        """Flush and close both connections."""
        if self._closed:
            return
        self._closed = True
        self._ready.set()  # wake who waits; they see that it is closed
        tasks = [*self._tasks, *filter(None, (self._restoring, self._declaring))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self._data.close(), self._control.close())

    async def settle(self, reply: str, payload: bytes) -> None:
        """Settle a delivery and wait for the broker's word (`Delivery` calls this). Raises: BrokerError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.publish_timeout_s
        while True:
            try:
                await self._wait_until_ready(deadline - loop.time())
                await self._control.request(
                    reply,
                    payload,
                    timeout_s=max(0.001, min(ATTEMPT_TIMEOUT_S, deadline - loop.time())),
                )
                return
            except DeniedError:
                raise
            except BrokerError:  # or nobody is there to settle with, as a cluster elects a leader
                self._check_open()
                if loop.time() + RETRY_S >= deadline:
                    raise
                # And again: settling twice does what settling once does.
                await asyncio.sleep(RETRY_S)

    async def hand_back(self, reply: str) -> None:
        """Give back a message that another worker took and is lost with: it comes again at once.

        `reply` is that `Delivery.reply`. Raises: BrokerError, also for what is no job's ack subject.
        """
        if not reply.startswith(ACKS_OF_JOBS):
            raise BrokerError(f"{reply!r} is no ack subject of a job")
        await self.signal(reply, nak_payload(0))

    async def signal(self, reply: str, payload: bytes) -> None:
        """Send a word about a delivery without waiting (`Delivery` calls this). Raises: BrokerError."""
        await self._wait_until_ready(self._settings.publish_timeout_s)
        await self._control.publish(reply, payload)

    def _connection_of(self, subject: str) -> Connection:
        return self._control if subject.startswith(f"{ROOT}.ctl.") else self._data

    async def _wait_until_ready(self, timeout_s: float) -> None:
        if not self._ready.is_set():
            try:
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._ready.wait()
            except TimeoutError:
                raise BrokerError(
                    f"not connected to {self._settings.shown_url} (broker.url) for {timeout_s:g} s"
                ) from None
        self._check_open()

    async def _wait_until_connected(self) -> None:
        await self._wait_until_ready(self._settings.publish_timeout_s)

    def _check_open(self) -> None:
        if self._failed.done():
            self._failed.result()
        if self._closed:
            raise BrokerError("this broker connection was closed")

    async def _store_part(
        self, subject: str, payload: bytes, message_id: str, headers: Mapping[str, str]
    ) -> bool:
        return await self.publish_durable(subject, payload, message_id=message_id, headers=headers)

    async def _check_in(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, blob_ttl_s: int
    ) -> tuple[bytes, Mapping[str, str]]:
        """Put a payload that is too large for one message into a blob."""
        blobs.check_size(subject, len(payload))
        headers = headers or {}
        if len(payload) <= self._data.max_payload // 2:
            return payload, headers
        ref = await self.put_blob(payload, ttl_s=blob_ttl_s)
        return b"", {**headers, blobs.BLOB_HEADER: ref}

    async def _received(self, message: Msg) -> Received:
        headers = message.headers or {}
        payload = message.data
        if blobs.BLOB_HEADER in headers:
            payload, headers = await self._check_out(message.subject, headers)
        return Received(message.subject, payload, headers, message.reply)

    async def _stored(self, message: Msg) -> Received:
        """Return a message read back from its stream; it comes on an inbox, its own subject in a header."""
        received = await self._received(message)
        return msgspec.structs.replace(received, subject=received.headers["Nats-Subject"], reply="")

    async def _check_out(
        self, subject: str, headers: Mapping[str, str]
    ) -> tuple[bytes, dict[str, str]]:
        """Return the blob in place of the ref.

        A blob that is gone gives an empty payload and leaves the ref: the receiver refuses the message as it
        refuses any that it can't read, and the dead letter says why.
        """
        rest = dict(headers)
        ref = rest.pop(blobs.BLOB_HEADER)
        try:
            return await blobs.get(self._data, ref), rest
        except blobs.BlobGoneError as error:
            logger.error(
                "payload is gone: %s", error, extra={"action": "blob_gone", "subject": subject}
            )
            return b"", dict(headers)

    async def _delivery(self, queue: WorkQueue, message: Msg) -> Delivery | None:
        headers = message.headers or {}
        payload = message.data
        taken_at = asyncio.get_running_loop().time()
        if blobs.BLOB_HEADER in headers:
            try:
                payload, headers = await self._check_out(message.subject, headers)
            except BrokerError as error:
                logger.warning(
                    "payload not read, the message goes back: %s",
                    error,
                    extra={"action": "blob_unreadable", "subject": message.subject},
                )
                self._give_back(message, delay_s=1.0)
                return None
            except asyncio.CancelledError:
                self._give_back(message)
                raise
        return Delivery(
            message,
            payload,
            headers,
            settler=self,
            ack_wait_s=queue.ack_wait_s,
            taken_at=taken_at,
        )

    def _give_back(self, message: Msg, delay_s: float = 0.0) -> None:
        if stored.status_of(message) is None:
            spawn(self._nak(message, delay_s), self._tasks)

    async def _nak(self, message: Msg, delay_s: float) -> None:
        try:
            await self._control.publish(message.reply, nak_payload(delay_s))
        except BrokerError as error:
            logger.warning(
                "message comes again only after ack_wait: %s",
                error,
                extra={"action": "nak_failed", "subject": message.subject},
            )

    async def _after_status(self, queue: WorkQueue, status: Msg, pause_s: float) -> None:
        """Nothing came. Unless that is all, make sure that the next take has better luck."""
        if stored.status_of(status) in ("404", "408"):
            return
        if stored.status_of(status) == "503":
            declared = (WorkQueue.of_model(*model) for model in self._models)
            if not any(queue in queues for queues in (self._queues, *declared)):
                raise BrokerError(
                    f"stream {queue.stream} has no consumer {queue.consumer}: call declare_model first"
                )
            await self._declare_once()
        else:
            logger.warning(
                "pull ended: %s",
                stored.description_of(status),
                extra={"action": "pull_ended", "consumer": queue.consumer},
            )
        await asyncio.sleep(max(0.0, pause_s))  # or a caller in a loop would spin

    async def _declare_once(self) -> None:
        """Declare for all who find something missing at the same time. Raises: DeniedError."""
        if self._declaring is None or self._declaring.done():
            self._declaring = asyncio.create_task(self._declare_until_done())
        await asyncio.shield(self._declaring)

    async def _declare_until_done(self) -> None:
        """Declare streams and consumers, as often as it takes. Raises: DeniedError."""
        failures = 0
        while True:
            try:
                await self._topology.declare_streams(self._control)
                for model in sorted(self._models):
                    await self._topology.declare_consumers(self._control, *model)
                for queue in self._queues:
                    await self._topology.declare_consumer(self._control, queue)
                return
            except DeniedError:
                raise
            except BrokerError as error:
                if failures % 25 == 0:
                    logger.warning(
                        "streams not declared yet: %s", error, extra={"action": "declare_failed"}
                    )
                failures += 1
                await asyncio.sleep(RETRY_S)

    def _on_lost(self) -> None:
        self.num_losses += 1
        if not self._closed and not self._failed.done():
            if self._ready.is_set():
                self.lost_at = time.monotonic()
            self._ready.clear()

    def _on_closed(self, reason: str) -> None:
        if not self._closed and not self._failed.done():
            self._failed.set_exception(
                BrokerError(f"{self._settings.shown_url} closed the connection for good: {reason}")
            )
            self._failed.exception()  # seen: perhaps nobody waits for it
            self._ready.set()  # wake who waits; they see why

    def _has_come(self) -> None:
        self.back_at = time.time()
        self._ready.set()

    def _on_back(self) -> None:
        if self._closed or not (self._data.is_connected and self._control.is_connected):
            return
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore())

    async def _restore(self) -> None:
        try:
            await self._declare_until_done()
        except DeniedError as error:
            logger.error("streams not declared: %s", error, extra={"action": "declare_failed"})
        if not (self._data.is_connected and self._control.is_connected):
            return  # one of them broke meanwhile; when it is back, this begins anew
        self._has_come()
        logger.info("broker is back", extra={"action": "restored"})
        for callback in self._callbacks:
            try:
                await callback()
            except HeadraceError as error:
                logger.warning(
                    "after a reconnect: %s", error, extra={"action": "on_reconnect_failed"}
                )
