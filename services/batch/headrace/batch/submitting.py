"""One line as a request: submitted, again for as long as that takes, and brought to its end."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.batch import results
from headrace.batch.inbox import Inbox
from headrace.batch.order import Item
from headrace.batch.ownership import Owned
from headrace.batch.results import Outcome
from headrace.batch.window import Window
from headrace.shared import subjects
from headrace.shared.batches import CANCELLED_CODE, EXPIRED_CODE, request_id_of
from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, QueueFullError, RequestError
from headrace.shared.messages import Terminal
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission
from headrace.shared.worker import terminal_of

logger = logging.getLogger(__name__)

AGAIN_S = 1.0


class Submitter:
    """Brings the lines of one batch to their ends."""

    def __init__(self, broker: Broker, inbox: Inbox, window: Window, owned: Owned) -> None:
        self._broker = broker
        self._inbox = inbox
        self._window = window
        self._owned = owned
        self._tenant = owned.tenant
        self.traceparent: str | None = None  #: the batch's trace: lines are linked to it

    def request_id(self, item: Item) -> str:
        """Return the ID under which every owner submits this line."""
        return request_id_of(self._owned.record.id, item.number)

    async def bring(self, item: Item, *, may_have_ended: bool) -> Terminal:
        """Return how a line ends. `may_have_ended`: an earlier owner may have submitted it."""
        request_id = self.request_id(item)
        with self._inbox.awaiting(self._tenant, request_id) as end:
            terminal = await self.stored(item) if may_have_ended else None
            if terminal is None:
                terminal = await self._submit(item, request_id) or await end
        self._window.ended(terminal.timings)
        return terminal

    async def stored(self, item: Item) -> Terminal | None:
        """Return the end that a line has already, if it has one."""
        return await self._inbox.stored(self._tenant, self.request_id(item))

    def outcome(self, item: Item, terminal: Terminal, max_bytes: int) -> Outcome:
        """Return what a line's end is in the batch's files; a line there has up to `max_bytes`."""
        request_id, custom_id = self.request_id(item), item.request.custom_id
        if terminal.status == "expired":
            return results.of_code(request_id, custom_id, EXPIRED_CODE)
        if terminal.status == "cancelled" and self._owned.record.cancelling_at is not None:
            return results.of_code(request_id, custom_id, CANCELLED_CODE)
        found = results.of_terminal(terminal, custom_id)
        if len(found.data) > max_bytes:
            return results.too_large(request_id, custom_id, len(found.data), max_bytes)
        return found

    async def _submit(self, item: Item, request_id: str) -> Terminal | None:
        """Submit a line through full queues and a broker that is away. Returns its end if it is refused."""
        now = time.time()
        submission = Submission(
            request_id=request_id,
            tenant=self._tenant,
            slug=subjects.model_slug(item.request.model),
            lane=Lane.BULK,
            endpoint=item.request.endpoint,
            deadline=self._owned.record.expires_at,
            accepted=now,
            body=item.request.body,
            traceparent=self.traceparent,
        )
        while True:
            try:
                await self._broker.publish_durable(
                    submission.subject,
                    submission.body,
                    message_id=submission.message_id,
                    headers=submission.to_headers(),
                )
                return None
            except QueueFullError as error:
                self._window.refused()
                wait_s = error.retry_after_s
            except RequestError as error:
                return terminal_of(request_id, error)
            except BrokerError as error:
                logger.warning(
                    "not submitted yet: %s",
                    error,
                    extra={"action": "submit_failed", "request_id": request_id},
                )
                wait_s = AGAIN_S
            await asyncio.sleep(wait_s)
