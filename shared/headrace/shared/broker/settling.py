"""Words about deliveries on their way to the broker: that one is done, comes again, or takes longer."""

from __future__ import annotations

import asyncio

from headrace.shared.broker.connection import DeniedError
from headrace.shared.broker.connections import Connections
from headrace.shared.broker.delivery import nak_payload
from headrace.shared.broker.durable import ATTEMPT_TIMEOUT_S, RETRY_S
from headrace.shared.errors import BrokerError

ACKS_OF_JOBS = ("$JS.ACK.HR_JOB_RT.", "$JS.ACK.HR_JOB.")


class Settling:
    """The `Settler` of every delivery of a process."""

    def __init__(self, connections: Connections, timeout_s: float) -> None:
        """`timeout_s`: how long a word is tried (seconds)."""
        self._connections = connections
        self._timeout_s = timeout_s

    async def settle(self, reply: str, payload: bytes) -> None:
        """Settle a delivery and wait for the broker's word. Raises: BrokerError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            try:
                await self._connections.wait_until_ready(deadline - loop.time())
                await self._connections.control.request(
                    reply,
                    payload,
                    timeout_s=max(0.001, min(ATTEMPT_TIMEOUT_S, deadline - loop.time())),
                )
                return
            except DeniedError:
                raise
            except BrokerError:  # or nobody is there to settle with, as a cluster elects a leader
                self._connections.check_open()
                if loop.time() + RETRY_S >= deadline:
                    raise
                # And again: settling twice does what settling once does.
                await asyncio.sleep(RETRY_S)

    async def signal(self, reply: str, payload: bytes) -> None:
        """Send a word about a delivery without waiting. Raises: BrokerError."""
        await self._connections.wait_until_ready(self._timeout_s)
        await self._connections.control.publish(reply, payload)

    async def hand_back(self, reply: str) -> None:
        """Give back a job that another worker took. Raises: BrokerError, also for what is no job's ack subject."""
        if not reply.startswith(ACKS_OF_JOBS):
            raise BrokerError(f"{reply!r} is no ack subject of a job")
        await self.signal(reply, nak_payload(0))
