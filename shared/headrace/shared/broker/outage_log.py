"""What is said of a broker that is away, and of messages that were dropped: now and then, not each time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.shared import metrics

logger = logging.getLogger(__name__)

UNREACHABLE_INTERVAL_S = 10.0  # between two warnings of one outage; five attempts a second fail
SLOW_INTERVAL_S = 10.0  # between two errors about messages that were dropped


class OutageLog:
    """The lines of one connection."""

    def __init__(self, label: str, clock: Callable[[], float]) -> None:
        """`clock` spaces the lines, in seconds."""
        self._label = label
        self._clock = clock
        self._warned_at: float | None = None  # None: the broker was reached since
        self._dropped_at: float | None = None  # when it was said last that messages were dropped
        self._num_dropped = 0  # since then

    def reached(self) -> None:
        """The broker is there: the next outage is told at once."""
        self._warned_at = None

    def unreachable(self, url: str, text: str) -> None:
        """An attempt to connect has failed."""
        now = self._clock()
        is_due = self._warned_at is None or now - self._warned_at >= UNREACHABLE_INTERVAL_S
        if is_due:
            self._warned_at = now
        logger.log(
            logging.WARNING if is_due else logging.DEBUG,
            "no broker at %s, trying on: %s",
            url,
            text,
            extra={"action": "broker_unreachable", "connection": self._label},
        )

    def dropped(self, subject: str) -> None:
        """A message was dropped here. A line for each would make a slow process slower still."""
        self._num_dropped += 1
        metrics.SLOW_CONSUMER.inc()
        now = self._clock()
        if self._dropped_at is None or now - self._dropped_at >= SLOW_INTERVAL_S:
            logger.error(
                "%d messages dropped: this process is too slow",
                self._num_dropped,
                extra={"action": "slow_consumer", "subject": subject},
            )
            self._dropped_at, self._num_dropped = now, 0
