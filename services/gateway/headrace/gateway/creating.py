"""Calls that generate: what is stored of them, whose key they have, and how they are answered."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.gateway import response_body
from headrace.gateway.answering import (
    JSON,
    CallResponse,
    Form,
    headers_of,
    terminal_response,
)
from headrace.gateway.call import Order
from headrace.gateway.errors import InFlightError, UnavailableError
from headrace.gateway.events import events_of
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import (
    KEY_HEADER,
    REPLAYED_HEADER,
    Claim,
    Idempotency,
    IdemRecord,
    fingerprint,
)
from headrace.gateway.link import Link
from headrace.gateway.models import resolve_model
from headrace.gateway.numbered_events import NumberedEvents
from headrace.gateway.reading import Readings, Target
from headrace.gateway.response_body import ResponseRequest
from headrace.gateway.response_events import ResponseEvents
from headrace.gateway.response_object import GRACE_S, StoredResponse, dressed, queued_response
from headrace.gateway.response_store import ResponseStore, end_of
from headrace.shared.errors import BrokerError, ConflictError, ExpiredError
from headrace.shared.messages import Terminal
from headrace.shared.subjects import Lane

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A call as it is going to be submitted."""

    order: Order
    record: StoredResponse | None = None  #: None: nothing of it is the gateway's business
    request: ResponseRequest | None = None  #: what it was read from
    history: tuple[dict[str, Any], ...] = ()  #: the conversation before it

    @property
    def is_stored(self) -> bool:
        """Whether it can be asked for later."""
        return self.record is not None and self.record.store

    def named(self, request_id: str) -> Plan:
        """Return the plan with another request ID."""
        order = replace(self.order, request_id=request_id, is_own_id=False)
        if self.record is None or self.request is None or not self.record.store:
            return replace(self, order=order)
        body = response_body.for_pipeline(self.request, request_id, list(self.history))
        record = msgspec.structs.replace(self.record, response_id=request_id)
        return replace(self, order=replace(order, body=body), record=record)

    def form(self) -> Form:
        """Return what its answer looks like."""
        record, request = self.record, self.request
        if record is None or request is None:
            events = events_of(self.order.endpoint)
            is_numbered = self.order.outlives_client
            return Form(events=NumberedEvents(events) if is_numbered else events)
        return Form(
            events=ResponseEvents(record, request.fields),
            body=lambda body: msgspec.json.encode(dressed(record, msgspec.json.decode(body))),
            starts_at_once=record.background,
        )


class Creations:
    """Starts calls, or finds those that were started with the same key."""

    def __init__(
        self,
        link: Link,
        handler: Handler,
        idempotency: Idempotency,
        responses: ResponseStore,
        readings: Readings,
        *,
        deadline_s: float,
        background_deadline_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._handler = handler
        self._idempotency = idempotency
        self._responses = responses
        self._readings = readings
        self._deadline_s = deadline_s
        self._background_deadline_s = background_deadline_s
        self._clock = clock

    async def create(self, order: Order, key: str | None) -> Response:
        """Return the answer of a new call, or of the one that had its key before.

        Raises: RequestError when it is not accepted.
        """
        if key is None and order.endpoint != "responses":
            return await self._start(Plan(order=order))
        try:
            plan = await self._plan(order)
            if key is None:
                return await self._start(plan)
            return await self._start_once(plan, key, fingerprint(order.endpoint, order.body))
        except BrokerError as error:
            raise UnavailableError(f"the request was not accepted: {error}") from error

    async def _plan(self, order: Order) -> Plan:
        request = response_body.read(order.body) if order.endpoint == "responses" else None
        if request is None:
            return Plan(order=order)
        self._handler.check_open()
        previous = request.previous_response_id
        history = await self._responses.history(order.tenant, previous) if previous else []
        now = self._clock()
        default_s = self._background_deadline_s if request.background else self._deadline_s
        timeout_s = default_s if order.timeout_s is None else order.timeout_s
        record = StoredResponse(
            response_id=f"resp_{uuid.uuid4().hex}",
            model=resolve_model(self._link.workers, order.model),
            created=now,
            deadline=now + timeout_s,
            background=request.background,
            stream=order.stream,
            store=request.store,
            previous_response_id=previous,
        )
        order = replace(
            order,
            body=response_body.for_pipeline(request, None, history),
            timeout_s=timeout_s,
            lane=Lane.STD if request.background else order.lane,
            keeps_result=request.store,
            outlives_client=request.background,
        )
        plan = Plan(order=order, record=record, request=request, history=tuple(history))
        return plan.named(record.response_id) if request.store else plan

    async def _start(self, plan: Plan) -> Response:
        record, order = plan.record, plan.order
        if record is not None and record.store:
            await self._responses.add(order.tenant, record, order.body)
        try:
            call = await self._handler.open(order)
        except BaseException:
            if plan.is_stored:
                await self._responses.discard(order.tenant, order.request_id)
            raise
        if record is not None and record.background and not order.stream:
            self._handler.leave(call)
            fields = {} if plan.request is None else plan.request.fields
            return _json(queued_response(record, fields), order.request_id, {})
        return CallResponse(call, self._handler, plan.form())

    async def _start_once(self, plan: Plan, key: str, mark: str) -> Response:
        """Start a call, unless one with its key was; whoever had the key first is answered by the pipeline."""
        order = plan.order
        timeout_s = self._deadline_s if order.timeout_s is None else order.timeout_s
        wanted = IdemRecord(
            fingerprint=mark,
            result_id="",
            created=0.0,
            endpoint=order.endpoint,
            model=order.model or "",
            stream=order.stream,
            deadline=self._clock() + timeout_s,
        )
        claim = await self._claim(plan, key, wanted)
        once = replace(order, keeps_result=True, outlives_client=True)
        plan = replace(plan, order=once).named(claim.record.result_id)
        if not claim.is_new:
            return await self._again(plan, claim)
        try:
            response = await self._start(plan)
        except BaseException:
            await self._idempotency.release(claim)
            raise
        await self._accept(claim)
        return response

    async def _claim(self, plan: Plan, key: str, wanted: IdemRecord) -> Claim:
        """Take a key, or return who has it; one whose call came to nothing, and may be tried again, is free."""
        tenant = plan.order.tenant
        result_id = plan.order.request_id if plan.is_stored else None
        is_background = plan.record is not None and plan.record.background
        try:
            claim = await self._idempotency.claim(tenant, key, wanted, result_id=result_id)
            if claim.is_new or is_background:  # one in the background was answered: it is there
                return claim
            end = await end_of(self._link, tenant, claim.record.result_id)
            if end is None or not _is_to_be_tried_again(end):
                return claim
            await self._idempotency.release(claim)
            return await self._idempotency.claim(tenant, key, wanted, result_id=result_id)
        except ConflictError as error:
            raise InFlightError(str(error)) from None

    async def _again(self, plan: Plan, claim: Claim) -> Response:
        order, record, known = plan.order, plan.record, claim.record
        if not known.is_accepted:
            await self._resubmit(plan, claim)
        headers = {REPLAYED_HEADER: "true"}
        if record is not None and record.background and not order.stream:
            stored = await self._responses.get(order.tenant, order.request_id)
            return _json(
                await self._responses.shown(order.tenant, stored), order.request_id, headers
            )
        if order.stream:
            response = await self._stream_again(plan, known)
            return response.with_headers(headers)
        terminal = await end_of(self._link, order.tenant, order.request_id)
        if terminal is None:
            raise self._not_there_yet(known)
        return self._whole_again(plan, terminal, headers)

    async def _stream_again(self, plan: Plan, known: IdemRecord) -> CallResponse:
        order = plan.order
        if plan.is_stored:
            stored = await self._responses.get(order.tenant, order.request_id)
            return await self._readings.response(order.tenant, stored, -1)
        target = Target(
            tenant=order.tenant,
            request_id=order.request_id,
            endpoint=order.endpoint,
            model=known.model,
            stream=True,
            deadline=known.deadline,
        )
        return await self._readings.resume(target, None, form=plan.form())

    def _whole_again(self, plan: Plan, terminal: Terminal, headers: dict[str, str]) -> Response:
        if terminal.status == "ok" and terminal.body:
            body = plan.form().body(terminal.body)
            terminal = msgspec.structs.replace(terminal, body=body)
        response = terminal_response(terminal, plan.order.request_id)
        response.headers.update(headers)
        return response

    def _not_there_yet(self, known: IdemRecord) -> InFlightError | ExpiredError:
        if self._clock() > known.deadline + GRACE_S:
            return ExpiredError(
                f"the request with this {KEY_HEADER} is past its deadline, and nothing is known of its end"
            )
        return InFlightError(
            f"the request with this {KEY_HEADER} is under way; ask again to get its answer"
        )

    async def _resubmit(self, plan: Plan, claim: Claim) -> None:
        """Do what the first caller's gateway may not have done before it ended: the ID keeps it one request."""
        order, known = plan.order, claim.record
        if plan.record is not None and plan.record.store:
            record = msgspec.structs.replace(
                plan.record, created=known.created, deadline=known.deadline
            )
            try:
                await self._responses.add(order.tenant, record, order.body)
            except ConflictError:
                logger.debug("it is stored already", extra={"action": "resubmit"})
        await self._handler.resubmit(order, accepted=known.created, deadline=known.deadline)
        await self._accept(claim)

    async def _accept(self, claim: Claim) -> None:
        try:
            await self._idempotency.accept(claim)
        except BrokerError as error:  # whoever comes next submits it again, under the same ID
            logger.warning(
                "not noted that a request was accepted: %s",
                error,
                extra={"action": "accept_not_noted", "request_id": claim.record.result_id},
            )


def _is_to_be_tried_again(end: Terminal) -> bool:
    """Whether nothing came of a request, through no fault of its own."""
    return end.status == "error" and end.retry_after_s is not None and end.seq == 0


def _json(value: dict[str, Any], request_id: str, headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(value), media_type=JSON, headers=headers_of(request_id) | headers
    )
