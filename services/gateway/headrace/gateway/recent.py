"""What is known of the last requests, in memory."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Literal

import msgspec

from headrace.shared.messages import Endpoint, Status, Timings

CAPACITY = 1_000


class Record(msgspec.Struct, kw_only=True):
    """One request, as `GET /requests/{request_id}` shows it."""

    request_id: str
    """Names the request."""
    tenant: str
    """Whose request it is."""
    model: str
    """Served model name."""
    endpoint: Endpoint
    """Which OpenAI endpoint."""
    stream: bool
    """Whether the answer goes out in chunks."""
    accepted: float
    """When the gateway accepted it (Unix seconds)."""
    status: Status | Literal["running"] = "running"
    """How it ended, as the pipeline says, or else as the gateway does."""
    http_status: int | None = None
    """What the client was answered. None: nothing yet."""
    first_byte_s: float | None = None
    """From acceptance until the first part of the answer reached the gateway. None: it did not."""
    total_s: float | None = None
    """From acceptance until the gateway was done with it. None: it is not."""
    timings: Timings = Timings()
    """Where the pipeline spent the time. Comes with the terminal."""


class Recent:
    """The last `capacity` records; of those that have ended the oldest goes first. What runs stays."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keep a new record."""
        self._records[record.tenant, record.request_id] = record
        if len(self._records) > self._capacity:
            ended = (key for key, kept in self._records.items() if kept.status != "running")
            if (oldest := next(ended, None)) is not None:
                del self._records[oldest]

    def discard(self, record: Record) -> None:
        """Forget a record whose request was not accepted after all."""
        self._records.pop((record.tenant, record.request_id), None)

    def last(self, tenant: str, num: int) -> list[Record]:
        """Return the last `num` records of a tenant, newest first."""
        own = (record for record in reversed(self._records.values()) if record.tenant == tenant)
        return list(islice(own, num))

    def get(self, tenant: str, request_id: str) -> Record | None:
        """Return the record of a tenant's request. None: unknown, another tenant's, or too long ago."""
        return self._records.get((tenant, request_id))
