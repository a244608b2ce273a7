"""How long work waits for workers of one kind: one of them looks, and tells it in its heartbeat.

Whoever may not read a queue, as a gateway may not, knows it from there.
"""

from __future__ import annotations

import asyncio
import logging

from headrace.shared.broker import Broker, DeniedError, WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.queue_look import age_s, oldest_waiting
from headrace.shared.subjects import Lane, Role, pool
from headrace.shared.workers import INTERVAL_S, WorkerTable

logger = logging.getLogger(__name__)


class QueueAges:
    """Looks at the queues of one role, model and contract, unless another worker of that kind does."""

    def __init__(
        self,
        broker: Broker,
        table: WorkerTable,
        instance: str,
        role: Role,
        *,
        slug: str,
        contract: str,
    ) -> None:
        """`instance` is this worker's name, `slug` its model's token in subjects."""
        self._admin = broker.admin
        self._table = table
        self._instance = instance
        self._kind = (role, slug, contract)
        queues = WorkQueue.of_model(slug, pool(slug, contract))
        self._queues = {queue.lane: queue for queue in queues if queue.role is role}
        self.waits_s: dict[Lane, float] = {}
        """As `Heartbeat.oldest_wait_s` has it."""

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Look now and then, until cancelled; a role that takes from no lane has nothing to look at."""
        while self._queues:
            try:
                self.waits_s = await self._look() if self._is_first() else {}
            except DeniedError as error:
                logger.warning(
                    "nobody knows how long work waits: %s",
                    error,
                    extra={"action": "queue_ages_denied"},
                )
                return
            except BrokerError as error:
                logger.debug("queues not seen: %s", error, extra={"action": "queues_unseen"})
                self.waits_s = {}
            await asyncio.sleep(interval_s)

    def _is_first(self) -> bool:
        role, slug, contract = self._kind
        ready = self._table.ready(role, slug=slug, contract=contract)
        return min((beat.instance for beat in ready), default=None) == self._instance

    async def _look(self) -> dict[Lane, float]:
        found: dict[Lane, float] = {}
        for lane, queue in self._queues.items():
            info = await self._admin.queue(queue.stream, queue.consumer)
            oldest = None if info is None else await oldest_waiting(self._admin, queue.stream, info)
            if oldest is not None:
                found[lane] = age_s(oldest)
        return found
