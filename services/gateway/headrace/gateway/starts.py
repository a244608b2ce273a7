"""Which background responses an engine works on: one gateway hears of each, and notes it."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from headrace.gateway.response_store import ResponseStore
from headrace.shared import subjects
from headrace.shared.broker import Broker, Received, Subscription
from headrace.shared.errors import BrokerError, RequestError
from headrace.shared.events import Event
from headrace.shared.tasks import spawn

logger = logging.getLogger(__name__)

QUEUE_GROUP = "gateway"

_decoder = msgspec.json.Decoder(Event)


class Starts:
    """Notes the starts of responses in their records. A word that is lost leaves one `queued` for longer."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, broker: Broker) -> Subscription:
        """Note what comes until the subscription ends. Raises: BrokerError."""
        return await broker.subscribe(
            subjects.event_change_filter("response", "started"), self._on_event, queue=QUEUE_GROUP
        )

    async def aclose(self) -> None:
        """Wait for what is being noted."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_event(self, received: Received) -> None:
        try:
            event = _decoder.decode(received.payload)
        except msgspec.DecodeError as error:
            logger.warning("unreadable event: %s", error, extra={"action": "event_unreadable"})
            return
        spawn(self._note(event), self._tasks)

    async def _note(self, event: Event) -> None:
        try:
            await self._responses.note(event.tenant, event.subject, has_started=True)
        except (BrokerError, RequestError) as error:
            logger.warning(
                "start of a response not noted: %s",
                error,
                extra={"action": "start_not_noted", "request_id": event.subject},
            )
