"""Which requests were begun by a decode worker, and when their results were stored, as far as it was heard."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

import msgspec

from headrace.shared import subjects
from headrace.shared.broker import Broker, Received
from headrace.shared.events import Event

from .check import Violation

MARGIN_S = 1.0  # a worker looks for a result, and begins a moment later


class Runs:
    """Listens to events; what is told while the broker is away is missed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._started: defaultdict[str, list[float]] = defaultdict(list)  # request ID → Unix times

    async def start(self) -> None:
        """Begin to listen. Raises: BrokerError."""
        await self._broker.subscribe(f"{subjects.ROOT}.ev.*.request.started", self._hear)

    @property
    def num_started(self) -> int:
        """How often a request was begun."""
        return sum(map(len, self._started.values()))

    async def check(self, tenant: str) -> list[Violation]:
        """No request was begun again once its result was stored."""
        found = []
        for request_id, times in self._started.items():
            if len(times) < 2:
                continue
            result = await self._broker.last(subjects.res(tenant, request_id))
            if result is None:
                found.append(Violation("has_result", request_id, "was begun and has no result"))
                continue
            stored = datetime.fromisoformat(result.headers["Nats-Time-Stamp"]).timestamp()
            if (late_s := max(times) - stored) > MARGIN_S:
                found.append(
                    Violation("run_again", request_id, f"was begun {late_s:.1f} s after its result")
                )
        return found

    def _hear(self, received: Received) -> None:
        event = msgspec.json.decode(received.payload, type=Event)
        self._started[event.subject].append(event.happened)
