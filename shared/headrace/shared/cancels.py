"""Cancels, heard by every worker that may hold the request."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from headrace.shared import subjects, wire
from headrace.shared.errors import WireError
from headrace.shared.messages import Cancel

if TYPE_CHECKING:
    from headrace.shared.broker import Broker, Received, Subscription

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 10_000


class Cancels:
    """Remembers the latest cancels, and calls back whoever runs a cancelled request.

    A cancel may come before its request is taken from a queue, and before this process has started: so the latest
    10,000 are remembered here, and the latest of the last day by the broker. Where there are more, the tenant with
    the most of them loses its oldest: no tenant can have another's forgotten.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._reasons: dict[str, OrderedDict[str, tuple[str, float]]] = {}  # by tenant and request
        self._num_reasons = 0
        self._callbacks: dict[tuple[str, str], list[Callable[[str], None]]] = {}
        self._subscription: Subscription | None = None

    async def start(self, broker: Broker) -> None:
        """Listen, and read what was cancelled before; what is missed without a broker is read when it is back.

        Raises: BrokerError.
        """
        self._subscription = await broker.subscribe(subjects.cancel_all(), self._on_cancel)

        async def catch_up() -> None:
            for received in await broker.stored_on(subjects.cancel_all()):
                self._on_cancel(received)

        broker.on_reconnect(catch_up)
        await catch_up()

    def reason(self, tenant: str, request_id: str, accepted: float | None) -> str | None:
        """Return why the request that was accepted then (Unix seconds) was cancelled. None: it was not.

        A cancel from before was meant for an earlier request of the same ID, which was not accepted.
        """
        found = self._reasons.get(tenant, OrderedDict()).get(request_id)
        if found is None:
            return None
        reason, heard = found
        return None if accepted is not None and heard < accepted else reason

    def watch(self, tenant: str, request_id: str, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the request is cancelled."""
        self._callbacks.setdefault((tenant, request_id), []).append(callback)

    def unwatch(self, tenant: str, request_id: str, callback: Callable[[str], None]) -> None:
        """Forget this callback; another part of the same request may have one of its own."""
        callbacks = self._callbacks.get((tenant, request_id), [])
        if callback in callbacks:
            callbacks.remove(callback)
        if not callbacks:
            self._callbacks.pop((tenant, request_id), None)

    def _on_cancel(self, received: Received) -> None:
        try:
            cancel = wire.decode(received.payload, Cancel)
        except WireError as error:
            logger.warning("unreadable cancel: %s", error, extra={"action": "cancel_unreadable"})
            return
        key = (cancel.tenant, cancel.request_id)
        if subjects.cancel(*key) != received.subject:
            logger.warning(
                "cancel for another tenant's request refused", extra={"action": "cancel_foreign"}
            )
            return
        self._remember(*key, cancel.reason, self._time_of(received))
        for callback in self._callbacks.pop(key, []):
            callback(cancel.reason)

    def _remember(self, tenant: str, request_id: str, reason: str, heard: float) -> None:
        reasons = self._reasons.setdefault(tenant, OrderedDict())
        self._num_reasons += request_id not in reasons
        reasons[request_id] = (reason, heard)
        reasons.move_to_end(request_id)
        while self._num_reasons > _MAX_REMEMBERED:
            most = max(self._reasons, key=lambda tenant: len(self._reasons[tenant]))
            self._reasons[most].popitem(last=False)
            self._num_reasons -= 1
            if not self._reasons[most]:
                del self._reasons[most]

    def _time_of(self, received: Received) -> float:
        """Return when it was cancelled: now, or when the broker stored what is read back."""
        stored = received.headers.get("Nats-Time-Stamp")
        return self._now() if stored is None else datetime.fromisoformat(stored).timestamp()
