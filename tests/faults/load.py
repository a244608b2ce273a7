"""The load: orders at a steady pace over all gateways and straight over NATS, never too many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from . import http_client
from .member import Member
from .nats_client import NatsClient
from .orders import Order
from .record import Record

MAX_TRIES = 40  # of a request that no gateway accepted; a client waits between two
TRY_AGAIN_S = 0.5


class Load:
    """Sends orders and keeps what was seen of each."""

    def __init__(
        self,
        make: Callable[[int], Order],
        gateways: list[Member],
        nats: NatsClient,
        *,
        max_open: int = 32,
    ) -> None:
        """`make` gives the order of a number, `max_open` bounds what is under way at once."""
        self.records: list[
            Record
        ] = []  #: every attempt; several of one order where one was refused
        self.num_sent = 0
        self.num_done = 0
        self.failures: list[str] = []  #: the harness's own
        self._make = make
        self._gateways = gateways
        self._nats = nats
        self._http = http_client.new_client()
        self._room = asyncio.Semaphore(max_open)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def num_open(self) -> int:
        """How many are under way."""
        return len(self._tasks)

    async def run(self, num: int, per_s: float, *, until: Callable[[], bool] | None = None) -> None:
        """Send `num` orders at that rate, or until `until` says so; does not wait for their ends."""
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        for _ in range(num):
            if until is not None and until():
                return
            await self._room.acquire()
            order = self._make(self.num_sent)
            self.num_sent += 1
            task = asyncio.create_task(self._one(order), name=order.request_id)
            self._tasks.add(task)
            task.add_done_callback(self._done)
            next_at = max(
                next_at + 1 / per_s, loop.time() - 5.0
            )  # after an outage, catch up a little
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    async def more_done(self, num: int) -> None:
        """Return when so many more orders have ended."""
        wanted = self.num_done + num
        while self.num_done < wanted:
            self._ended.clear()
            await self._ended.wait()

    async def finish(self) -> None:
        """Wait until all that was sent has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._http.aclose()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()
        self.num_done += 1
        self._ended.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(f"{task.get_name()}: {error!r}")

    async def _one(self, order: Order) -> None:
        """Send an order; one that was not accepted is tried again, elsewhere."""
        for attempt in range(MAX_TRIES):
            request_id = order.request_id if attempt == 0 else f"{order.request_id}-{attempt}"
            record = Record(order, request_id, sent=time.time())
            self.records.append(record)
            if order.way == "nats":
                await self._nats.send(order, record)
            else:
                gateway = self._gateways[(order.number + attempt) % len(self._gateways)]
                record.gateway = gateway.name
                await http_client.send(self._http, order, record, gateway.url, self._cancel)
            if record.end != "refused":
                return
            await asyncio.sleep(TRY_AGAIN_S)

    async def _cancel(self, record: Record) -> None:
        """Cancel over NATS, or over HTTP at a gateway that has never heard of the request."""
        if record.order.number % 2:
            await self._nats.cancel(record)
            return
        others = [gateway for gateway in self._gateways if gateway.name != record.gateway]
        await http_client.cancel(self._http, record, (others or self._gateways)[0].url)
