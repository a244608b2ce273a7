"""What is left to do for a call whose client was answered, or is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from headrace.gateway.call import Call
from headrace.gateway.link import Link
from headrace.shared import subjects, wire
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Cancel
from headrace.shared.tasks import spawn

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class Farewell:
    """Cancels what the pipeline has not ended, and unsubscribes; beside the calls, as tasks."""

    def __init__(self, link: Link, *, cancel_interval_s: float) -> None:
        self._link = link
        self._cancel_interval_s = cancel_interval_s
        self._brief: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, which ends soon, beside the calls."""
        return spawn(work, self._brief)

    def leave(self, call: Call) -> None:
        """Unsubscribe from the answer."""
        self.spawn(self._leave(call))

    def cancel(self, call: Call, reason: str) -> None:
        """Cancel the request, once."""
        self.spawn(self._cancel(call, reason))

    def see_off(self, call: Call, reason: str) -> None:
        """Cancel the request until the pipeline has ended it, or its deadline is past.

        Once is not enough: a cancel is a core message, and a worker that comes later has not heard it.
        """
        self.cancel(call, reason)
        spawn(self._see_off(call, reason), self._waiting)

    async def aclose(self) -> None:
        """End it all; what was to be cancelled is cancelled once."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        if self._brief:
            await asyncio.wait(self._brief, timeout=CLOSE_TIMEOUT_S)
        for task in self._brief:
            task.cancel()
        await asyncio.gather(*self._brief, return_exceptions=True)

    async def _see_off(self, call: Call, reason: str) -> None:
        try:
            while (remaining := call.wait_until - asyncio.get_running_loop().time()) > 0:
                try:
                    async with asyncio.timeout(min(remaining, self._cancel_interval_s)):
                        await call.answer.ended.wait()
                except TimeoutError:
                    await self._cancel(call, reason)
                    continue
                if call.answer.terminal is not None:
                    call.record.timings = call.answer.terminal.timings
                return
        finally:
            self.leave(call)

    async def _cancel(self, call: Call, reason: str) -> None:
        tenant, request_id = call.record.tenant, call.record.request_id
        cancel = Cancel(request_id=request_id, tenant=tenant, reason=reason)
        try:
            await self._link.broker.publish(
                subjects.cancel(tenant, request_id), wire.encode(cancel)
            )
        except BrokerError as error:
            logger.warning(
                "cancel not published: %s",
                error,
                extra={"action": "cancel_failed", "request_id": request_id},
            )

    async def _leave(self, call: Call) -> None:
        if call.subscription is not None:
            await call.subscription.drop()  # nobody reads what may still come
