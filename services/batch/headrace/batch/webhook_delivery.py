"""One webhook on its way to one endpoint: tried, noted, and settled, for good or until the next try."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.shared.broker import Broker, Delivery
from headrace.shared.errors import MalformedMessageError
from headrace.shared.events import Event
from headrace.shared.records import Records
from headrace.shared.webhooks.endpoints import (
    Attempt,
    Endpoint,
    Sending,
    body_of,
    sending_id,
    type_of,
    webhook_id_of,
)
from headrace.shared.webhooks.sender import Sender

logger = logging.getLogger(__name__)

MAX_PER_ENDPOINT = 4  # requests at once, so that one that hangs leaves slots to the others
BUSY_S = 5.0
GONE = 410  # the receiver wants no more of this, ever
RETRY_DELAYS_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Between the tries, as Standard Webhooks advises: 3 days from the first to the last."""
LOG_S = 7 * 86_400
"""How long it stays known how a webhook fared, and that it is not to be sent again."""


class Deliveries:
    """Delivers webhooks, with what is known of each in a record."""

    def __init__(self, broker: Broker, sender: Sender, delays_s: Sequence[float]) -> None:
        """`delays_s`: between the tries; behind the last one it is given up."""
        self._records = Records(broker)
        self._sender = sender
        self._delays_s = tuple(delays_s)
        self._num_running: Counter[str] = Counter()  # of each endpoint

    async def deliver(self, delivery: Delivery) -> None:
        """Try once, note how it went, and settle: for good, or until the next try."""
        event = event_of(delivery)
        tenant, endpoint_id = event.tenant, delivery.subject.rpartition(".")[2]
        found = await self._records.get("hook", tenant, endpoint_id, Endpoint)
        if found is None or found[0].disabled:
            await delivery.ack()
            return
        endpoint = found[0]
        sending, revision = await self._sending(tenant, endpoint_id, event)
        if sending.state != "pending":  # an event that was told again, or a try whose ack was lost
            await delivery.ack()
            return
        if self._num_running[endpoint_id] >= MAX_PER_ENDPOINT:
            await delivery.nak(BUSY_S)
            return
        attempt = await self._send(delivery, endpoint, sending.id, body_of(event))
        delay_s = self._delay_s(len(sending.attempts))
        sending = after(sending, attempt, delay_s)
        await self._note(tenant, sending, revision)
        _log(sending, attempt)
        if attempt.status_code == GONE:
            await self._disable(tenant, endpoint_id)
        if sending.state == "pending" and delay_s is not None:
            await delivery.nak(delay_s)
        else:
            await delivery.ack()

    async def _send(
        self, delivery: Delivery, endpoint: Endpoint, webhook_id: str, body: bytes
    ) -> Attempt:
        self._num_running[endpoint.id] += 1
        try:
            async with delivery.keep_alive():
                return await self._sender.send(
                    endpoint.url, endpoint.secrets(time.time()), webhook_id, body
                )
        finally:
            self._num_running[endpoint.id] -= 1
            if not self._num_running[endpoint.id]:
                del self._num_running[endpoint.id]

    def _delay_s(self, num_tried: int) -> float | None:
        """Return how long to wait behind one more failure. None: it was the last try."""
        if num_tried >= len(self._delays_s):
            return None
        return self._delays_s[num_tried] * random.uniform(1.0, 1.1)

    async def _sending(self, tenant: str, endpoint_id: str, event: Event) -> tuple[Sending, int]:
        webhook_id = webhook_id_of(event)
        name = sending_id(endpoint_id, webhook_id)
        found = await self._records.get("hooklog", tenant, name, Sending)
        if found is not None:
            return found
        return (
            Sending(
                id=webhook_id,
                endpoint_id=endpoint_id,
                type=type_of(event),
                subject=event.subject,
                created_at=time.time(),
            ),
            0,
        )

    async def _note(self, tenant: str, sending: Sending, revision: int) -> None:
        name = sending_id(sending.endpoint_id, sending.id)
        await self._records.put("hooklog", tenant, name, sending, expect=revision, ttl_s=LOG_S)

    async def _disable(self, tenant: str, endpoint_id: str) -> None:
        found = await self._records.get("hook", tenant, endpoint_id, Endpoint)
        if found is not None:
            reason = f"the receiver answered {GONE}"
            endpoint = msgspec.structs.replace(found[0], disabled=reason)
            await self._records.put("hook", tenant, endpoint_id, endpoint, expect=found[1])


def after(sending: Sending, attempt: Attempt, delay_s: float | None) -> Sending:
    """Return what is known of a sending after one more attempt; `delay_s` as in `Deliveries._delay_s`."""
    is_last = delay_s is None or attempt.status_code == GONE
    next_at = None if attempt.is_ok or is_last else attempt.at + attempt.seconds + (delay_s or 0.0)
    return msgspec.structs.replace(
        sending,
        state="delivered" if attempt.is_ok else "failed" if is_last else "pending",
        attempts=(*sending.attempts, attempt),
        next_attempt_at=next_at,
    )


def event_of(delivery: Delivery) -> Event:
    """Return the event that is to be told. Raises: MalformedMessageError."""
    try:
        return msgspec.json.decode(delivery.payload, type=Event)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"no event: {error}") from None


def _log(sending: Sending, attempt: Attempt) -> None:
    logger.info(
        "webhook %s: %s",
        sending.state,
        attempt.error or attempt.status_code,
        extra={
            "action": f"webhook_{sending.state}",
            "webhook_id": sending.id,
            "endpoint_id": sending.endpoint_id,
            "num_attempts": len(sending.attempts),
        },
    )
