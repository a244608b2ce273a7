"""What this process needs of the broker: its streams, and the consumers that it asked for, declared again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headrace.shared.broker.connection import DeniedError
from headrace.shared.broker.connections import Connections
from headrace.shared.broker.durable import RETRY_S
from headrace.shared.broker.topology import Topology
from headrace.shared.broker.work_queue import WorkQueue
from headrace.shared.errors import BrokerError

logger = logging.getLogger(__name__)


class Declarations:
    """Remembers what was declared, for when the broker has lost it."""

    def __init__(self, connections: Connections, topology: Topology, timeout_s: float) -> None:
        """`timeout_s`: how long `model` and `queue` try (seconds)."""
        self._connections = connections
        self._topology = topology
        self._timeout_s = timeout_s
        self._models: set[tuple[str, str]] = set()
        self._queues: set[WorkQueue] = set()
        self._declaring: asyncio.Task[None] | None = None

    async def model(self, slug: str, pool: str) -> None:
        """Declare the consumers of a model and contract. Raises: BrokerError."""
        self._models.add((slug, pool))
        control = self._connections.control
        await self._in_time(lambda: self._topology.declare_consumers(control, slug, pool))

    async def queue(self, queue: WorkQueue) -> None:
        """Declare one queue's consumer. Raises: BrokerError."""
        self._queues.add(queue)
        control = self._connections.control
        await self._in_time(lambda: self._topology.declare_consumer(control, queue))

    def has(self, queue: WorkQueue) -> bool:
        """Whether a queue was declared here, by itself or with its model."""
        models = (WorkQueue.of_model(*model) for model in self._models)
        return queue in self._queues or any(queue in queues for queues in models)

    async def until_done(self) -> None:
        """Declare streams and consumers, as often as it takes. Raises: DeniedError."""
        failures = 0
        control = self._connections.control
        while True:
            try:
                await self._topology.declare_streams(control)
                for model in sorted(self._models):
                    await self._topology.declare_consumers(control, *model)
                for queue in tuple(self._queues):  # more may be declared meanwhile
                    await self._topology.declare_consumer(control, queue)
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

    async def once(self) -> None:
        """Declare all, once for all who find something missing at the same time. Raises: DeniedError."""
        if self._declaring is None or self._declaring.done():
            self._declaring = asyncio.create_task(self.until_done())
        await asyncio.shield(self._declaring)

    async def close(self) -> None:
        """Give up what is being declared."""
        if self._declaring is not None:
            self._declaring.cancel()
            await asyncio.gather(self._declaring, return_exceptions=True)

    async def _in_time(self, declare: Callable[[], Awaitable[None]]) -> None:
        """Declare, again until the timeout: a cluster may just elect a leader."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            await self._connections.wait_until_ready(deadline - loop.time())
            try:
                return await declare()
            except DeniedError:
                raise
            except BrokerError:
                if loop.time() + RETRY_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
