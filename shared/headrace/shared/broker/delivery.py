"""One message taken from a work queue, and the ways to settle it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec
from nats.aio.msg import Msg

from headrace.shared.errors import BrokerError

logger = logging.getLogger(__name__)

NAK = b"-NAK"
IN_PROGRESS = b"+WPI"
TERM = b"+TERM"
ACK = b"+ACK"


class Settler(Protocol):
    """How a delivery reaches the broker."""

    async def settle(self, reply: str, payload: bytes) -> None:
        """Send and wait until the broker has it. Raises: BrokerError."""
        ...

    async def signal(self, reply: str, payload: bytes) -> None:
        """Send without waiting. Raises: BrokerError."""
        ...


class Delivery:
    """A message that this worker holds until it is settled, or until `ack_wait` passes without a sign."""

    __slots__ = (
        "_ack_wait_s",
        "_settler",
        "_taken_at",
        "headers",
        "num_delivered",
        "payload",
        "published",
        "reply",
        "sequence",
        "stream",
        "subject",
    )

    def __init__(
        self,
        message: Msg,
        payload: bytes,
        headers: Mapping[str, str],
        *,
        settler: Settler,
        ack_wait_s: float,
        taken_at: float,
    ) -> None:
        """`taken_at`: when it came, of the event loop's clock; its payload may have had to be fetched since."""
        metadata = message.metadata
        self.subject = message.subject
        self.payload = payload
        self.headers = headers
        self.num_delivered = metadata.num_delivered  #: 1 the first time
        self.stream = metadata.stream  #: with the next one the name of the message, for ever
        self.sequence = metadata.sequence.stream
        self.published = metadata.timestamp.timestamp()  #: when the broker stored it (Unix seconds)
        self.reply = message.reply  #: its ack subject; another process may give it back there
        self._settler = settler
        self._ack_wait_s = ack_wait_s
        self._taken_at = taken_at

    async def ack(self) -> None:
        """Remove the message from its queue; the broker has done so when this returns. Raises: BrokerError."""
        await self._settler.settle(self.reply, ACK)

    async def term(self, reason: str) -> None:
        """Remove the message because nobody will ever be able to work it off. Raises: BrokerError."""
        await self._settler.settle(self.reply, f"{TERM.decode()} {reason}".encode())

    async def nak(self, delay_s: float = 0) -> None:
        """Give the message back, to be taken again after `delay_s` seconds. Raises: BrokerError."""
        await self._settler.signal(self.reply, nak_payload(delay_s))

    async def in_progress(self) -> None:
        """Start `ack_wait` anew. Raises: BrokerError."""
        await self._settler.signal(self.reply, IN_PROGRESS)

    @contextlib.asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[None]:
        """Send `in_progress` every third of `ack_wait`, from when it was taken on, while the block runs."""
        loop = asyncio.get_running_loop()
        signs: list[asyncio.Task[None]] = []
        # Most blocks end before it goes off: it costs them no task.
        timer = loop.call_at(
            self._taken_at + self._ack_wait_s / 3,
            lambda: signs.append(loop.create_task(self._keep_alive())),
        )
        try:
            yield
        finally:
            timer.cancel()
            for task in signs:
                task.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def _keep_alive(self) -> None:
        while True:
            try:
                await self.in_progress()
            except BrokerError as error:
                # The broker is away, and with it its clock: the next one may still be in time.
                logger.warning(
                    "in_progress not sent: %s",
                    error,
                    extra={"action": "in_progress_failed", "subject": self.subject},
                )
            await asyncio.sleep(self._ack_wait_s / 3)


def nak_payload(delay_s: float) -> bytes:
    """Return the words that give a message back after `delay_s` seconds."""
    if delay_s <= 0:
        return NAK
    return NAK + b" " + msgspec.json.encode({"delay": int(delay_s * 10**9)})
