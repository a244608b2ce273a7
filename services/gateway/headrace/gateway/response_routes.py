"""The routes of stored responses: asked for, read as a stream, cancelled, deleted."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.gateway import response_body
from headrace.gateway.answering import json_response
from headrace.gateway.auth import tenant_of
from headrace.gateway.handler import Handler
from headrace.gateway.numbered_events import LAST_EVENT_ID
from headrace.gateway.pace import Pace
from headrace.gateway.paging import is_descending, limit_of, list_object
from headrace.gateway.reading import Readings, event_number
from headrace.gateway.response_object import StoredResponse
from headrace.gateway.response_store import ResponseStore
from headrace.shared.errors import BadRequestError

DEFAULT_PAGE = 20
MAX_PAGE = 100
_TRUE = ("true", "1")


def add_response_routes(
    app: FastAPI, responses: ResponseStore, readings: Readings, handler: Handler, *, pace: Pace
) -> None:
    """Add them. Their errors are the application's to answer: RequestError, BrokerError."""

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        tenant = tenant_of(request)
        record = await responses.get(tenant, response_id)
        if request.query_params.get("stream", "").lower() not in _TRUE:
            return json_response(await responses.shown(tenant, record))
        text = request.query_params.get("starting_after") or request.headers.get(LAST_EVENT_ID)
        return await readings.response(tenant, record, event_number(text, "starting_after"))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        tenant = tenant_of(request)
        record = await responses.get(tenant, response_id)
        if not record.background:
            raise BadRequestError(
                "Cannot cancel a synchronous response: only one with `background` true",
                param="response_id",
            )
        if await responses.end_of(tenant, record) is None:
            await handler.cancel(tenant, response_id)
            await responses.note(tenant, response_id, is_cancelled=True)
            await _until_ended(tenant, record)
        return json_response(
            await responses.shown(tenant, await responses.get(tenant, response_id))
        )

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        tenant = tenant_of(request)
        record = await responses.get(tenant, response_id)
        if await responses.end_of(tenant, record) is None:
            await handler.cancel(tenant, response_id)
        await responses.discard(tenant, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        tenant = tenant_of(request)
        record = await responses.get(tenant, response_id)
        await responses.end_of(tenant, record)  # its time may be over
        fields = await responses.fields_of(record)
        return json_response(
            _page(response_body.listed_items(fields.get("input"), response_id), request)
        )

    async def _until_ended(tenant: str, record: StoredResponse) -> None:
        """Wait a little for the pipeline's own word, so that what is answered stays true."""
        until = asyncio.get_running_loop().time() + pace.cancel_wait_s
        while await responses.end_of(tenant, record) is None:
            if asyncio.get_running_loop().time() >= until:
                return
            await asyncio.sleep(pace.cancel_poll_s)


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return a page of items as OpenAI lists them. Raises: BadRequestError."""
    asked = request.query_params
    limit = limit_of(asked, DEFAULT_PAGE, MAX_PAGE)
    if is_descending(asked):
        items = items[::-1]
    if (after := asked.get("after")) is not None:
        places = [index for index, item in enumerate(items) if item.get("id") == after]
        items = items[places[0] + 1 :] if places else []
    page = items[:limit]
    return list_object(page, has_more=len(items) > len(page))
