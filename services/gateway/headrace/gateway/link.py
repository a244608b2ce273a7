"""The gateway's way to the pipeline: a broker and a table of workers, once they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.shared.errors import BrokerError

if TYPE_CHECKING:
    from headrace.shared.broker import Broker
    from headrace.shared.workers import WorkerTable

NOT_CONNECTED = "the gateway is not connected to the broker"


class Link:
    """The HTTP server is up before the broker is reached."""

    def __init__(self) -> None:
        self._broker: Broker | None = None
        self._workers: WorkerTable | None = None

    def open(self, broker: Broker, workers: WorkerTable) -> None:
        """Use these from here on."""
        self._broker, self._workers = broker, workers

    @property
    def broker(self) -> Broker:
        """The connection, which may be away for a while. Raises: BrokerError when there never was one."""
        if self._broker is None:
            raise BrokerError(NOT_CONNECTED)
        return self._broker

    @property
    def workers(self) -> WorkerTable:
        """The table of workers. Raises: BrokerError when it is stale, for want of a connection."""
        if self._workers is None or not self.broker.is_connected:
            raise BrokerError(NOT_CONNECTED)
        return self._workers
