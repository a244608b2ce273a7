"""What this process has published of answers lately: published again when the broker was away.

A broker that is killed takes its memory with it, and with it what it had acknowledged and not yet delivered.
Readers drop what they have.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.shared import wire
from headrace.shared.errors import BrokerError, RequestError
from headrace.shared.messages import Takeover, Terminal
from headrace.shared.owners import is_ended_by

if TYPE_CHECKING:
    from headrace.shared.broker import Broker

logger = logging.getLogger(__name__)

KEEP_S = 5.0
"""A broker that is there has delivered by then what it took."""
KEEP_BYTES = 64 * 2**20


class _Sent(msgspec.Struct, frozen=True):
    at: float
    subject: str
    payload: bytes
    message_id: str | None  #: None: published without an ack


class Outbox:
    """Publishes on `out`, and keeps what it published for `KEEP_S` seconds, at most `KEEP_BYTES` of it."""

    def __init__(self, broker: Broker, *, now: Callable[[], float] = time.monotonic) -> None:
        self._broker = broker
        self._now = now
        self._sent: deque[_Sent] = deque()
        self._num_bytes = 0
        self._num_losses = broker.num_losses  # those after which all was published again
        self._missed_since = float("inf")  # what came later was not published again after a loss
        broker.on_reconnect(self._publish_again)

    async def publish(self, subject: str, payload: bytes) -> None:
        """Publish without an ack. Raises: as `Broker.publish`."""
        await self._broker.publish(subject, payload)
        self._keep(_Sent(self._now(), subject, payload, None))

    async def publish_durable(
        self, subject: str, payload: bytes, *, message_id: str, expect_last: int | None = None
    ) -> bool:
        """Publish with an ack. Returns and raises as `Broker.publish_durable`."""
        is_stored = await self._broker.publish_durable(
            subject, payload, message_id=message_id, expect_last=expect_last
        )
        if is_stored:
            self._keep(_Sent(self._now(), subject, payload, message_id))
        return is_stored

    def _keep(self, sent: _Sent) -> None:
        self._sent.append(sent)
        self._num_bytes += len(sent.payload)
        # While the broker is away, and until all was published again, nothing is too old.
        oldest = sent.at - KEEP_S if self._num_losses == self._broker.num_losses else float("-inf")
        while self._sent and (self._num_bytes > KEEP_BYTES or self._sent[0].at < oldest):
            self._num_bytes -= len(self._sent.popleft().payload)

    async def _publish_again(self) -> None:
        num_losses = self._broker.num_losses
        # What is older had been delivered when the broker was lost.
        self._missed_since = min(self._missed_since, self._broker.lost_at - KEEP_S)
        kept = [sent for sent in self._sent if sent.at >= self._missed_since]
        try:
            for sent in kept:
                if sent.message_id is None:
                    await self._broker.publish(sent.subject, sent.payload)
                elif not await self._has_ended(sent):
                    await self._broker.publish_durable(
                        sent.subject, sent.payload, message_id=sent.message_id
                    )
        except (BrokerError, RequestError) as error:  # away again: all of it after the next time
            logger.warning(
                "answers not published again: %s", error, extra={"action": "outbox_failed"}
            )
            return
        self._missed_since = float("inf")
        self._num_losses = num_losses

    async def _has_ended(self, sent: _Sent) -> bool:
        """Whether a request was ended by somebody else while the broker was away. Raises: BrokerError."""
        messages = await self._broker.replay(sent.subject)
        if not messages:
            return False
        # Behind that end may be what this process has published again before.
        epoch = wire.decode(sent.payload, Takeover, Terminal).epoch
        return any(is_ended_by(message, epoch) for message in messages)
