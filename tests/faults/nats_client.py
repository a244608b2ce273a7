"""One request straight over NATS: a submission, and its one result."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received
from headrace.shared.errors import BrokerError, RequestError
from headrace.shared.messages import Cancel, Terminal
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

from .answers import problems_of_body
from .nats_reader import RETRY_S, Reader
from .orders import Order
from .record import Record
from .stack import MODEL

TENANT = "default"
LOOK_AGAIN_S = 0.5  # a live message comes a moment before the stream has stored it
HANG_S = 40.0  # this long past its deadline a request is given up: longer than any ack_wait


class NatsClient:
    """Submits orders, and reads their results from the stream that keeps them."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._came: dict[str, asyncio.Event] = {}
        self._readers: set[Reader] = set()

    async def start(self) -> None:
        """Listen for results: each says that it is time to look into the stream."""
        await self._broker.subscribe(f"{subjects.ROOT}.res.{TENANT}.*", self._on_result)
        self._broker.on_reconnect(self._reread)

    async def send(self, order: Order, record: Record) -> None:
        """Submit an order and note what comes of it."""
        record.deadline = record.sent + order.timeout_s
        self._came[record.request_id] = asyncio.Event()
        reader = None
        if order.stream or order.lane is Lane.RT:
            reader = Reader(self._broker, TENANT, record.request_id, order)
            self._readers.add(reader)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(order.timeout_s + HANG_S):
                if reader is not None:
                    await reader.start()
                await self._submit(order, record)
                if order.ending == "cancel":
                    tasks.append(asyncio.create_task(self._cancel_later(order, record)))
                await self._read(order, record, reader)
        except TimeoutError:
            record.end = "none" if record.accepted else "refused"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._came[record.request_id]
            if reader is not None:
                self._readers.discard(reader)
                await reader.stop()

    async def cancel(self, record: Record) -> None:
        """Publish a cancel; one that the broker does not get is as good as lost on the way."""
        cancel = Cancel(
            request_id=record.request_id, tenant=TENANT, reason="the caller changed its mind"
        )
        try:
            await self._broker.publish(
                subjects.cancel(TENANT, record.request_id), wire.encode(cancel)
            )
        except BrokerError:
            return

    async def result(self, request_id: str) -> bytes | None:
        """Return what the stream of results holds of a request. Raises: BrokerError."""
        stored = await self._broker.last(subjects.res(TENANT, request_id))
        return None if stored is None else stored.payload

    async def _submit(self, order: Order, record: Record) -> None:
        """Publish until it is acknowledged, as a caller does who wants it done."""
        submission = Submission(
            request_id=record.request_id,
            tenant=TENANT,
            slug=subjects.model_slug(MODEL),
            lane=order.lane,
            endpoint=order.endpoint,
            deadline=record.deadline,
            accepted=record.sent,
            body=msgspec.json.encode(order.body),
        )
        while record.accepted is None:
            try:
                await self._broker.publish_durable(
                    submission.subject,
                    submission.body,
                    message_id=submission.message_id,
                    headers=submission.to_headers(),
                )
            except BrokerError:
                await asyncio.sleep(RETRY_S)
                continue
            record.accepted = time.time()

    async def _read(self, order: Order, record: Record, reader: Reader | None) -> None:
        if order.lane is not Lane.RT:
            record.result = await self._kept(record)
            terminal = wire.decode(record.result, Terminal)
            record.ended = time.time()
        if reader is not None:
            try:
                terminal = await reader.terminal(record.deadline + HANG_S)
            except RequestError as error:
                record.end, record.http_status = "error", error.http_status
                record.message = f"reader: {error.message}"
                record.problems = reader.streamed.check_so_far()
                return
            finally:
                record.ended = record.ended or time.time()
                record.num_events = reader.streamed.num_events
        _judge(order, record, terminal, reader)

    async def _kept(self, record: Record) -> bytes:
        came = self._came[record.request_id]
        while True:
            try:
                result = await self.result(record.request_id)
            except BrokerError:
                await asyncio.sleep(RETRY_S)
                continue
            if result is not None:
                return result
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await came.wait()
            except TimeoutError:
                continue
            came.clear()

    async def _cancel_later(self, order: Order, record: Record) -> None:
        await asyncio.sleep(order.after_s)
        await self.cancel(record)

    def _on_result(self, received: Received) -> None:
        if came := self._came.get(received.subject.rpartition(".")[2]):
            came.set()

    async def _reread(self) -> None:
        for reader in self._readers:
            reader.reread()


def _judge(order: Order, record: Record, terminal: Terminal, reader: Reader | None) -> None:
    """Note how it ended, and what is wrong with the answer."""
    record.workers = dict(terminal.timings.workers)
    record.http_status = terminal.http_status
    is_streamed = reader is not None and order.stream
    if terminal.status == "ok":
        record.end = "ok"
        if is_streamed and reader is not None:
            record.problems = reader.streamed.check()
        else:
            record.problems = problems_of_body(order, terminal.body)
        return
    record.end = "error"
    record.message = f"{terminal.status}: {json.loads(terminal.body)['error']['message']}"
    if is_streamed and reader is not None:
        record.problems = reader.streamed.check_so_far()
