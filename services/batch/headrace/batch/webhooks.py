"""Webhooks: events that an endpoint wants to hear of become deliveries, and deliveries are tried until one succeeds.

What waits for its next try waits in the broker: it is there after any restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from headrace.batch.webhook_delivery import RETRY_DELAYS_S, Deliveries, event_of
from headrace.shared import subjects
from headrace.shared.broker import Broker, Delivery, WorkQueue
from headrace.shared.errors import BrokerError, ConflictError, RequestError, WireError
from headrace.shared.events import Event
from headrace.shared.intake import Intake, Slots, all_or_none
from headrace.shared.records import Records
from headrace.shared.settings import WebhookSettings
from headrace.shared.webhooks.endpoints import EVENT_TYPES, MAX_ENDPOINTS, Endpoint, type_of
from headrace.shared.webhooks.sender import Sender

logger = logging.getLogger(__name__)

EVENT_KINDS = ("batch", "response")
EVENT_SLOTS = 8
_Work = Callable[[Delivery], Awaitable[None]]


class Webhooks:
    """Sends the webhooks of every tenant; any number of processes may do so side by side."""

    def __init__(
        self,
        broker: Broker,
        settings: WebhookSettings,
        *,
        delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._broker = broker
        self._records = Records(broker)
        self._sender = Sender(allow_private=settings.allow_private, timeout_s=settings.timeout_s)
        self._deliveries = Deliveries(broker, self._sender, delays_s)
        self._slots = settings.slots

    async def serve(self, stop: asyncio.Event) -> None:
        """Send until `stop` is set, then let the running requests end. Raises: BrokerError, DeniedError."""
        events = [WorkQueue.events(kind) for kind in EVENT_KINDS]
        for queue in (*events, WorkQueue.hooks()):
            await self._broker.declare_queue(queue)
        try:
            await all_or_none(
                [
                    self._intake(events, EVENT_SLOTS, self._hand_out).run(stop),
                    self._intake([WorkQueue.hooks()], self._slots, self._deliveries.deliver).run(
                        stop
                    ),
                ]
            )
        finally:
            await self._sender.close()

    def _intake(self, queues: Sequence[WorkQueue], num_slots: int, work: _Work) -> Intake:
        return Intake(
            self._broker,
            queues,
            Slots(num_slots),
            lambda delivery: _settle(delivery, work),
            on_stop=_nothing,
        )

    async def _hand_out(self, delivery: Delivery) -> None:
        """Make one delivery for each endpoint that wants to hear of an event."""
        event = event_of(delivery)
        if type_of(event) in EVENT_TYPES:
            tenant = event.tenant
            page = await self._records.list("hook", tenant, Endpoint, limit=MAX_ENDPOINTS)
            for endpoint in (record.value for record in page.records):
                if _wants(endpoint, event):
                    await self._broker.publish_durable(
                        subjects.hook(tenant, endpoint.id),
                        delivery.payload,
                        message_id=f"{event.id}.{endpoint.id}",
                    )
        await delivery.ack()


def _wants(endpoint: Endpoint, event: Event) -> bool:
    """An endpoint hears of what happened since it was made."""
    return (
        endpoint.disabled is None
        and type_of(event) in endpoint.event_types
        and event.happened >= endpoint.created_at
    )


async def _settle(delivery: Delivery, work: _Work) -> None:
    """Run `work`, which settles; what the broker kept it from comes again."""
    try:
        await work(delivery)
    except WireError as error:
        logger.error(
            "message on %s dropped: %s",
            delivery.subject,
            error,
            extra={"action": "webhook_unreadable", "subject": delivery.subject},
        )
        await delivery.term(str(error))
    except (BrokerError, RequestError, ConflictError) as error:
        logger.warning(
            "message on %s not settled, it will come again: %s",
            delivery.subject,
            error,
            extra={"action": "not_settled", "subject": delivery.subject},
        )


async def _nothing() -> None:
    pass
