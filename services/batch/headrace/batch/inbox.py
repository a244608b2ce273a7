"""The ends of the lines that are under way: heard as they come, and read back where one may have been missed.

A subscription may miss a message, as when the broker restarts; what is stored is not lost. So after each reconnect,
and now and then, the results that are still awaited are looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received, Subscription
from headrace.shared.errors import BrokerError, EngineRequestError, WireError
from headrace.shared.messages import Terminal
from headrace.shared.worker import terminal_of

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 10.0
AGAIN_S = 0.5


class Inbox:
    """The results of every tenant whose batches this worker runs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # Two owners of one batch may be in this process, until the first one learns of the second.
        self._waiting: dict[tuple[str, str], list[asyncio.Future[Terminal]]] = {}
        self._subscriptions: dict[str, tuple[int, Subscription]] = {}  # by tenant: users, and it
        self._subscribing = asyncio.Lock()
        self._look = asyncio.Event()
        broker.on_reconnect(self._on_reconnect)

    @contextlib.asynccontextmanager
    async def listening(self, tenant: str) -> AsyncIterator[None]:
        """Hear the results of a tenant while the block runs. Raises: BrokerError."""
        async with self._subscribing:
            users, subscription = self._subscriptions.get(tenant, (0, None))
            if subscription is None:
                subscription = await self._broker.subscribe(subjects.res_all(tenant), self._receive)
            self._subscriptions[tenant] = users + 1, subscription
        try:
            yield
        finally:
            async with self._subscribing:
                users, subscription = self._subscriptions.pop(tenant)
                if users > 1:
                    self._subscriptions[tenant] = users - 1, subscription
                else:
                    await subscription.unsubscribe()

    @contextlib.contextmanager
    def awaiting(self, tenant: str, request_id: str) -> Iterator[asyncio.Future[Terminal]]:
        """Give the future end of a request; enter before it is submitted."""
        key = (tenant, request_id)
        future: asyncio.Future[Terminal] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        try:
            yield future
        finally:
            self._waiting[key].remove(future)
            if not self._waiting[key]:
                del self._waiting[key]

    async def stored(self, tenant: str, request_id: str) -> Terminal | None:
        """Return the end of a request if it has one, however long the broker is away."""
        while True:
            try:
                found = await self._broker.last(subjects.res(tenant, request_id))
                return None if found is None else wire.decode(found.payload, Terminal)
            except WireError as error:
                wrong = EngineRequestError(f"what is stored of this request can't be read: {error}")
                return terminal_of(request_id, wrong)
            except BrokerError as error:
                logger.warning(
                    "a result is not read yet: %s", error, extra={"action": "result_not_read"}
                )
                await asyncio.sleep(AGAIN_S)

    async def run(self) -> None:
        """Look results up that may have been missed, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._look.wait()
            self._look.clear()
            for tenant, request_id in list(self._waiting):
                terminal = await self.stored(tenant, request_id)
                if terminal is not None:
                    self._end(tenant, request_id, terminal)

    def _receive(self, received: Received) -> None:
        _, _, _, tenant, request_id = received.subject.split(".")
        if (tenant, request_id) not in self._waiting:
            return
        try:
            self._end(tenant, request_id, wire.decode(received.payload, Terminal))
        except WireError as error:
            logger.error(
                "not a result: %s",
                error,
                extra={"action": "result_refused", "request_id": request_id},
            )

    def _end(self, tenant: str, request_id: str, terminal: Terminal) -> None:
        for future in self._waiting.get((tenant, request_id), ()):
            if not future.done():
                future.set_result(terminal)

    async def _on_reconnect(self) -> None:
        self._look.set()
