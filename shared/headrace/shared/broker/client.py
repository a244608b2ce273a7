"""The broker as the services see it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping

from headrace.shared.broker import blobs, scoped, stored
from headrace.shared.broker.admin import Admin
from headrace.shared.broker.connection import NoResponderError
from headrace.shared.broker.connections import Connections
from headrace.shared.broker.declarations import Declarations
from headrace.shared.broker.delivery import Delivery
from headrace.shared.broker.documents import Documents
from headrace.shared.broker.durable import MESSAGE_ID_HEADER, DurablePublisher
from headrace.shared.broker.message import Received
from headrace.shared.broker.payloads import Payloads
from headrace.shared.broker.settling import Settling
from headrace.shared.broker.streams import BLOB_S, OUT_STREAM, Stream
from headrace.shared.broker.subscription import Subscription, subscribe
from headrace.shared.broker.takes import Takes
from headrace.shared.broker.topology import CLIENT, Topology
from headrace.shared.broker.work_queue import WorkQueue
from headrace.shared.errors import BrokerError, NoWorkerError
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role


class Broker:
    """All that a process does with NATS. Where the broker is away, each call waits for it, so long as it says."""

    def __init__(self, settings: BrokerSettings, *, role: str, name: str) -> None:
        timeout_s = settings.publish_timeout_s
        self._topology = Topology(settings, role)
        self._reader = scoped if role == CLIENT else stored
        self._connections = connections = Connections(
            settings, role=role, name=name, declare=lambda: self._declarations.until_done()
        )
        self._data, self._control = connections.data, connections.control
        self._declarations = Declarations(connections, self._topology, timeout_s)
        self._durable = DurablePublisher(self._data, connections.wait_until_ready, timeout_s)
        self._payloads = Payloads(self._data, self._durable)
        self._settling = Settling(connections, timeout_s)
        self._takes = Takes(connections, self._declarations, self._payloads, self._settling)

    @classmethod
    async def connect(cls, settings: BrokerSettings, *, role: Role | str, name: str) -> Broker:
        """Connect and declare the streams, waiting for the broker as long as it takes.

        Raises: BrokerError when the broker refuses the user, or denies it a stream of its role.
        """
        broker = cls(settings, role=str(role), name=name)
        try:
            await broker._connections.open()
        except BaseException:
            await broker.close()
            raise
        return broker

    @property
    def is_connected(self) -> bool:
        """Whether both connections are up and the streams declared."""
        return self._connections.is_connected

    @property
    def is_closed(self) -> bool:
        """Whether it will never be connected again."""
        return self._connections.is_closed

    @property
    def num_losses(self) -> int:
        """How often a connection to the broker broke."""
        return self._connections.num_losses

    @property
    def lost_at(self) -> float:
        """When the broker was there for the last time (`time.monotonic`); -inf: it was never lost."""
        return self._connections.lost_at

    @property
    def back_at(self) -> float:
        """When the broker was reached last, after a loss or at first (Unix seconds)."""
        return self._connections.back_at

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` each time the broker was away, once streams and consumers are declared again."""
        self._connections.callbacks.append(callback)

    async def closed_for_good(self) -> None:
        """Never return. Raises: BrokerError when the broker ended a connection in a way that no reconnect mends."""
        await self._connections.closed_for_good()

    @property
    def admin(self) -> Admin:
        """What operators do to streams; the broker denies it to most users."""
        return Admin(self._data, self._payloads.stored)

    @property
    def documents(self) -> Documents:
        """What is changed by compare-and-set, one message a subject."""
        wait = self._connections.wait_until_connected
        return Documents(self._data, self._durable, self._topology, wait)

    async def declare_model(self, slug: str, pool: str | None = None) -> None:
        """Declare the durable consumers of one model and contract; again after each reconnect.

        `pool` is `subjects.pool` of both; None: the slug alone. Raises: BrokerError.
        """
        await self._declarations.model(slug, pool or slug)

    async def declare_queue(self, queue: WorkQueue) -> None:
        """Declare a queue beside those of the model; again after each reconnect. Raises: BrokerError."""
        await self._declarations.queue(queue)

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without an ack: at most once.

        Waits `publish_timeout_s` for a broker that is away. Raises: BrokerError, PayloadTooLargeError.
        """
        blobs.check_size(subject, len(payload))
        if len(payload) > self._payloads.max_bytes:
            payload, headers = await self._payloads.check_in(subject, payload, headers, BLOB_S)
        if not self._connections.is_connected:
            await self._connections.wait_until_connected()
        await self._connections.of(subject).publish(subject, payload, headers=headers)

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
        payload, headers = await self._payloads.check_in(
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

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Ask one listener and return its answer.

        Raises: NoWorkerError when nobody listens, BrokerError on timeout, PayloadTooLargeError.
        """
        payload, headers = await self._payloads.check_in(subject, payload, None, BLOB_S)
        await self._connections.wait_until_ready(timeout_s)
        try:
            message = await self._connections.of(subject).request(
                subject, payload, timeout_s=timeout_s, headers=headers
            )
        except NoResponderError as error:
            raise NoWorkerError(str(error)) from None
        return (await self._payloads.received(message)).payload

    async def respond(self, received: Received, payload: bytes) -> None:
        """Answer a request. Raises: BrokerError, also when no answer is awaited."""
        if not received.reply:
            raise BrokerError(f"the message on {received.subject} awaits no answer")
        payload, headers = await self._payloads.check_in(received.reply, payload, None, BLOB_S)
        await self._connections.wait_until_connected()
        # On the connection that the request came on: the permission to respond is that connection's.
        connection = self._connections.of(received.subject)
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
        return await subscribe(
            self._connections,
            self._payloads,
            subject,
            handler,
            queue=queue,
            is_confirmed=is_confirmed,
        )

    async def take(
        self, queue: WorkQueue, *, wait_s: float, is_last_resort: bool = False
    ) -> Delivery | None:
        """Take one message, or return None when none came within `wait_s` seconds (0: at once).

        `is_last_resort`: only what no other take of a queue `with_last_resort` waits for.
        Any number of takes may wait at once. A take that is cancelled leaves nothing behind: what comes too
        late is given back. Raises: BrokerError when the queue was never declared, or this user may not.
        """
        return await self._takes.take(queue, wait_s=wait_s, is_last_resort=is_last_resort)

    async def hand_back(self, reply: str) -> None:
        """Give back a message that another worker took and is lost with: it comes again at once.

        `reply` is that `Delivery.reply`. Raises: BrokerError, also for what is no job's ack subject.
        """
        await self._settling.hand_back(reply)

    async def replay(self, subject: str, *, from_seq_of: int = 0) -> list[Received]:
        """Return the captured messages of one `out` subject, in order.

        `from_seq_of`: only those from this stream sequence on (an earlier one's header `Nats-Sequence`).
        Raises: BrokerError.
        """
        await self._connections.wait_until_connected()
        messages = await self._reader.read_subject(
            self._data, OUT_STREAM, subject, first_seq=from_seq_of
        )
        return [await self._payloads.stored(message) for message in messages]

    async def stored_on(self, pattern: str) -> list[Received]:
        """Return the messages that their stream holds of every subject of a pattern, in order. Raises: BrokerError."""
        stream = self._stream_of(pattern)
        await self._connections.wait_until_connected()
        messages = await self._reader.read_subject(self._data, stream.name, pattern)
        return [await self._payloads.stored(message) for message in messages]

    async def last(self, subject: str) -> Received | None:
        """Return the last message that its stream holds of a subject, or None. Raises: BrokerError."""
        stream = self._stream_of(subject)
        await self._connections.wait_until_connected()
        message = await self._reader.read_last(self._data, stream.name, subject)
        return None if message is None else await self._payloads.stored(message)

    async def put_blob(self, data: bytes, *, ttl_s: int = BLOB_S) -> str:
        """Store up to 64 MB for `ttl_s` seconds and return a ref to it.

        Raises: PayloadTooLargeError, QueueFullError, BrokerError.
        """
        return await self._payloads.put(data, ttl_s=ttl_s)

    async def get_blob(self, ref: str) -> bytes:
        """Return what a ref stands for. Raises: BrokerError, also when it is past its age limit."""
        await self._connections.wait_until_connected()
        return await self._payloads.get(ref)

    async def close(self) -> None:
        """Flush and close both connections."""
        if self._connections.shut():
            await self._declarations.close()
            await self._takes.close()
            await self._connections.close()

    def _stream_of(self, subject: str) -> Stream:
        stream = self._topology.stream_of(subject)
        if stream is None:
            raise BrokerError(f"{subject} is captured by no stream")
        return stream
