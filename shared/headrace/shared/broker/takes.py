"""Taking messages from work queues, one at a time: each becomes a `Delivery`, or goes back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.shared.broker import blobs
from headrace.shared.broker.connection import DeniedError
from headrace.shared.broker.connections import Connections
from headrace.shared.broker.declarations import Declarations
from headrace.shared.broker.delivery import Delivery, Settler, nak_payload
from headrace.shared.broker.durable import RETRY_S
from headrace.shared.broker.message import description_of, status_of
from headrace.shared.broker.payloads import Payloads
from headrace.shared.broker.work_queue import LAST_RESORT_GROUP, WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.tasks import spawn

logger = logging.getLogger(__name__)

PULL_MARGIN_S = 2.0  # the broker ends a pull itself; past this it has forgotten us


class Takes:
    """Any number of takes may wait at once."""

    def __init__(
        self,
        connections: Connections,
        declarations: Declarations,
        payloads: Payloads,
        settler: Settler,
    ) -> None:
        self._connections = connections
        self._declarations = declarations
        self._payloads = payloads
        self._settler = settler
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(
        self, queue: WorkQueue, *, wait_s: float, is_last_resort: bool
    ) -> Delivery | None:
        """Take one message, as `Broker.take` says."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        if not self._connections.is_ready:
            try:
                await self._connections.wait_until_ready(wait_s)
            except BrokerError:
                self._connections.check_open()
                return None
        self._connections.check_open()
        remaining = max(0.0, deadline - loop.time())
        pull: dict[str, Any] = (
            {"batch": 1, "expires": int(remaining * 1e9)}
            if remaining
            else {"batch": 1, "no_wait": True}
        )
        if queue.with_last_resort:
            pull |= {"group": LAST_RESORT_GROUP, "priority": int(is_last_resort)}
        try:
            message = await self._connections.control.pull(
                f"$JS.API.CONSUMER.MSG.NEXT.{queue.stream}.{queue.consumer}",
                msgspec.json.encode(pull),
                timeout_s=remaining + PULL_MARGIN_S,
                give_back=self._give_back,
            )
        except DeniedError:
            raise
        except BrokerError:
            self._connections.check_open()
            # The connection broke. Not at once: a caller that takes in a loop would keep the news from us.
            await asyncio.sleep(max(0.0, min(RETRY_S, deadline - loop.time())))
            return None
        if message is None:
            return None
        if status_of(message) is None:
            return await self._delivery(queue, message)
        await self._after_status(queue, message, min(RETRY_S, deadline - loop.time()))
        return None

    async def close(self) -> None:
        """Give up what is being given back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _delivery(self, queue: WorkQueue, message: Msg) -> Delivery | None:
        headers = message.headers or {}
        payload = message.data
        taken_at = asyncio.get_running_loop().time()
        if blobs.BLOB_HEADER in headers:
            try:
                payload, headers = await self._payloads.check_out(message.subject, headers)
            except BrokerError as error:
                logger.warning(
                    "payload not read, the message goes back: %s",
                    error,
                    extra={"action": "blob_unreadable", "subject": message.subject},
                )
                self._give_back(message, delay_s=1.0)
                return None
            except asyncio.CancelledError:
                self._give_back(message)
                raise
        return Delivery(
            message,
            payload,
            headers,
            settler=self._settler,
            ack_wait_s=queue.ack_wait_s,
            taken_at=taken_at,
        )

    def _give_back(self, message: Msg, delay_s: float = 0.0) -> None:
        if status_of(message) is None:
            spawn(self._nak(message, delay_s), self._tasks)

    async def _nak(self, message: Msg, delay_s: float) -> None:
        try:
            await self._connections.control.publish(message.reply, nak_payload(delay_s))
        except BrokerError as error:
            logger.warning(
                "message comes again only after ack_wait: %s",
                error,
                extra={"action": "nak_failed", "subject": message.subject},
            )

    async def _after_status(self, queue: WorkQueue, status: Msg, pause_s: float) -> None:
        """Nothing came. Unless that is all, make sure that the next take has better luck."""
        if status_of(status) in ("404", "408"):
            return
        if status_of(status) == "503":
            if not self._declarations.has(queue):
                raise BrokerError(
                    f"stream {queue.stream} has no consumer {queue.consumer}: call declare_model first"
                )
            await self._declarations.once()
        else:
            logger.warning(
                "pull ended: %s",
                description_of(status),
                extra={"action": "pull_ended", "consumer": queue.consumer},
            )
        await asyncio.sleep(max(0.0, pause_s))  # or a caller in a loop would spin
