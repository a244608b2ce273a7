"""The HTTP routes of batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.gateway.answering import json_response
from headrace.gateway.auth import tenant_of
from headrace.gateway.batches import MAX_LIST, Batches
from headrace.gateway.batches_once import BatchesOnce
from headrace.gateway.batches_order import BatchOrder, fields_of, order_of
from headrace.gateway.batches_view import batch_object
from headrace.gateway.body import read_body
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import KEY_HEADER, REPLAYED_HEADER, fingerprint, key_of
from headrace.gateway.pace import Pace
from headrace.gateway.paging import limit_of, list_object
from headrace.shared.batches import BatchRecord

MAX_ORDER_BYTES = 256 * 2**10
DEFAULT_LIST = 20


def add_batches_routes(
    app: FastAPI, handler: Handler, batches: Batches, *, once: BatchesOnce, pace: Pace
) -> None:
    """Add `/v1/batches`; `handler` says whether anything new is taken.

    Their errors are the application's to answer: RequestError, BrokerError, FileGoneError.
    """

    async def body_of(request: Request) -> bytes:
        handler.check_open()
        return await read_body(
            request.stream(),
            request.headers.get("content-length"),
            max_bytes=MAX_ORDER_BYTES,
            timeout_s=pace.body_timeout_s,
        )

    async def made(
        request: Request, body: bytes, make: Callable[[str | None], Awaitable[BatchRecord]]
    ) -> Response:
        key = key_of(request.headers.getlist(KEY_HEADER))
        if key is None:
            return json_response(batch_object(await make(None)))
        mark = fingerprint(request.url.path, body)
        batch, is_new = await once.make(tenant_of(request), key, mark, make)
        response = json_response(batch_object(batch))
        if not is_new:
            response.headers[REPLAYED_HEADER] = "true"
        return response

    @app.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        body = await body_of(request)
        order = order_of(fields_of(body))

        async def make(batch_id: str | None) -> BatchRecord:
            return await batches.create(tenant_of(request), order, batch_id=batch_id)

        return await made(request, body, make)

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        query = request.query_params
        page = await batches.list(
            tenant_of(request),
            after=query.get("after"),
            limit=limit_of(query, DEFAULT_LIST, MAX_LIST),
        )
        data = [batch_object(record.value) for record in page.records]
        return json_response(list_object(data, has_more=page.has_more))

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        return json_response(batch_object(await batches.get(tenant_of(request), batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        return json_response(batch_object(await batches.cancel(tenant_of(request), batch_id)))

    @app.post("/v1/batches/{batch_id}/retry")
    async def retry_batch(request: Request, batch_id: str) -> Response:
        body = await body_of(request)
        changed = fields_of(body)

        def order(batch: BatchRecord, input_file_id: str) -> BatchOrder:
            own = {
                "endpoint": batch.endpoint,
                "completion_window": batch.completion_window,
                "metadata": batch.metadata,
            }
            return order_of({**own, **changed, "input_file_id": input_file_id})

        async def make(retry_id: str | None) -> BatchRecord:
            return await batches.retry(tenant_of(request), batch_id, order, retry_id=retry_id)

        return await made(request, body, make)
