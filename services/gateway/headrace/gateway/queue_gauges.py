"""How long the queues are, as metrics: the gateway looks at them for all stages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.shared import metrics
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError
from headrace.shared.queue_look import Queue, QueueEye
from headrace.shared.workers import WorkerTable

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0


async def watch(
    broker: Broker,
    workers: WorkerTable,
    interval_s: float = INTERVAL_S,
    *,
    on_look: Callable[[], None] = lambda: None,
) -> None:
    """Look at the queues now and then, until cancelled; `on_look` is called after each look."""
    eye = QueueEye(broker, workers)
    while True:
        try:
            show(await eye.look() or [])
        except BrokerError as error:
            logger.debug("queues not seen: %s", error, extra={"action": "queues_unseen"})
        on_look()
        await asyncio.sleep(interval_s)


def show(queues: list[Queue]) -> None:
    """Set the gauges to what these queues hold, and forget those that are gone."""
    for gauge in (metrics.QUEUE_DEPTH, metrics.QUEUE_TAKEN, metrics.QUEUE_AGE):
        gauge.clear()
    for queue in queues:
        name, lane = metrics.queue_of(queue.info.filter_subject)
        if lane == "own":  # a prefill worker's: as many series as workers ever were
            continue
        labels = (name, queue.model, lane)
        metrics.QUEUE_DEPTH.labels(*labels).set(queue.info.num_waiting)
        metrics.QUEUE_TAKEN.labels(*labels).set(queue.info.num_taken)
        if queue.oldest_s is not None:
            metrics.QUEUE_AGE.labels(*labels).set(queue.oldest_s)
        elif not queue.info.num_waiting:
            metrics.QUEUE_AGE.labels(*labels).set(0.0)
