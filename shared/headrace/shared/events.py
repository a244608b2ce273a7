"""What happens to requests and batches, told to whoever wants to know: CloudEvents 1.0 in the stream `HR_EV`.

An event is CloudEvents' JSON format, as its NATS binding has it in structured mode:
https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/nats-protocol-binding.md
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from headrace.shared import subjects
from headrace.shared.broker.durable import MESSAGE_ID_HEADER
from headrace.shared.errors import BrokerError, QueueFullError, RequestError
from headrace.shared.messages import Status, Terminal
from headrace.shared.subjects import Lane
from headrace.shared.tasks import spawn

if TYPE_CHECKING:
    from headrace.shared.broker import Broker

logger = logging.getLogger(__name__)

CONTENT_TYPE = {"content-type": "application/cloudevents+json"}
TYPE_PREFIX = "headrace."
RESPONSE_PREFIX = "resp_"
"""Begins the IDs of what the Responses API calls a response: its events are named as OpenAI names them."""

Kind = Literal["request", "response", "batch"]
_ENDS: Mapping[Status, str] = {
    "ok": "completed",
    "error": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}


class _Answer(msgspec.Struct):
    status: str = ""


_answer_decoder = msgspec.json.Decoder(_Answer)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event, with CloudEvents' own attributes."""

    id: str  #: the same however often the event is told: `<tenant>.<subject>.<change>`
    source: str  #: `/headrace/tenants/<tenant>`; names the event together with `id`
    type: str  #: `headrace.<kind>.<change>`
    subject: str  #: the request's or the batch's ID
    time: str  #: when it happened (RFC 3339, UTC)
    data: dict[str, Any]  #: numbers and states alone, never what was asked or answered
    specversion: str = "1.0"
    datacontenttype: str = "application/json"

    @property
    def name(self) -> str:
        """`<kind>.<change>`, as `batch.completed`."""
        return self.type.removeprefix(TYPE_PREFIX)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.source.rpartition("/")[2]

    @property
    def happened(self) -> float:
        """When (Unix seconds)."""
        return datetime.fromisoformat(self.time).timestamp()


def event(
    tenant: str, kind: Kind, change: str, subject: str, data: dict[str, Any], *, at: float
) -> Event:
    """Return the event of one change, which happened at `at` (Unix seconds)."""
    return Event(
        id=f"{tenant}.{subject}.{change}",
        source=f"/headrace/tenants/{tenant}",
        type=f"{TYPE_PREFIX}{kind}.{change}",
        subject=subject,
        time=datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds"),
        data=data,
    )


def kind_of(request_id: str) -> Kind:
    """Return what a request is called in its events."""
    return "response" if request_id.startswith(RESPONSE_PREFIX) else "request"


class Events:
    """Tells the events of one process. None of it makes a token wait."""

    def __init__(self, broker: Broker, lanes: Collection[Lane]) -> None:
        """`lanes`: of which lanes the requests are told."""
        self._broker = broker
        self._lanes = frozenset(lanes)
        self._tasks: set[asyncio.Task[None]] = set()

    def request(
        self, change: Literal["accepted", "started"], tenant: str, lane: Lane, request_id: str
    ) -> None:
        """Tell how far a `std` or `bulk` request is; without an ack, so a lost one stays lost."""
        if lane in self._lanes and lane is not Lane.RT:
            told = event(
                tenant,
                kind_of(request_id),
                change,
                request_id,
                {"lane": str(lane)},
                at=time.time(),
            )
            spawn(self._tell(told), self._tasks)

    async def request_ended(self, tenant: str, lane: Lane, terminal: Terminal) -> None:
        """Tell a request's end: of `std` and `bulk` with an ack, so that it is there once the job is acked.

        Raises: BrokerError when the broker does not take it in time; told again, it is the same event.
        """
        if lane not in self._lanes:
            return
        timings = terminal.timings
        data = {
            "lane": str(lane),
            "status": terminal.status,
            "http_status": terminal.http_status,
            "num_prompt_token_ids": timings.num_prompt_token_ids,
            "num_output_token_ids": timings.num_output_token_ids,
        }
        request_id = terminal.request_id
        told = event(
            tenant,
            kind_of(request_id),
            end_of(terminal),
            request_id,
            data,
            at=time.time(),
        )
        if lane is Lane.RT:  # somebody waits for the answer, and sees its end
            spawn(self._tell(told), self._tasks)
        else:
            await self._store(told)

    async def batch(self, tenant: str, batch_id: str, status: str, data: dict[str, Any]) -> None:
        """Tell a batch's new status. Raises: BrokerError; told again, it is the same event."""
        await self._store(event(tenant, "batch", status, batch_id, data, at=time.time()))

    async def close(self) -> None:
        """Wait until what was told is with the broker."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, told: Event) -> None:
        try:
            await self._broker.publish(
                _subject(told),
                msgspec.json.encode(told),
                {**CONTENT_TYPE, MESSAGE_ID_HEADER: told.id},
            )
        except (BrokerError, RequestError) as error:
            _log_lost(told, error)

    async def _store(self, told: Event) -> None:
        try:
            await self._broker.publish_durable(
                _subject(told),
                msgspec.json.encode(told),
                message_id=told.id,
                headers=CONTENT_TYPE,
            )
        except QueueFullError as error:  # an end is worth more than word of it
            _log_lost(told, error)


def end_of(terminal: Terminal) -> str:
    """Return how a request ended, in the words of its events: a response that was cut short is `incomplete`."""
    answer = terminal.result or terminal.body
    if terminal.status == "ok" and answer and kind_of(terminal.request_id) == "response":
        try:
            if _answer_decoder.decode(answer).status == "incomplete":
                return "incomplete"
        except msgspec.DecodeError:  # an ID that only looks like a response's
            pass
    return _ENDS[terminal.status]


def _subject(told: Event) -> str:
    kind, _, change = told.name.partition(".")
    return subjects.event(told.tenant, kind, change)


def _log_lost(told: Event, error: Exception) -> None:
    logger.warning(
        "event %s not told: %s",
        told.name,
        error,
        extra={"action": "event_lost", "request_id": told.subject},
    )
