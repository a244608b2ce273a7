"""The HTTP routes of files and batches."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headrace.gateway.answering import JSON, error_response
from headrace.gateway.auth import tenant_of
from headrace.gateway.batches import MAX_LIST as MAX_BATCHES
from headrace.gateway.batches import Batches
from headrace.gateway.batches_once import BatchesOnce
from headrace.gateway.batches_order import BatchOrder, fields_of, order_of
from headrace.gateway.batches_view import batch_object, file_object
from headrace.gateway.body import read_body
from headrace.gateway.errors import NotFoundError
from headrace.gateway.files import MAX_LIST as MAX_FILES
from headrace.gateway.files import Files
from headrace.gateway.files_content import ContentResponse
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import KEY_HEADER, REPLAYED_HEADER, fingerprint, key_of
from headrace.gateway.pace import Pace
from headrace.gateway.paging import is_descending, limit_of, list_object
from headrace.shared.batches import BatchRecord
from headrace.shared.errors import (
    CancelledRequestError,
    FileGoneError,
    RequestError,
)
from headrace.shared.records import Page

P = ParamSpec("P")
T = TypeVar("T", bound=msgspec.Struct)

MAX_ORDER_BYTES = 256 * 2**10
DEFAULT_BATCHES = 20


def add_routes(
    app: FastAPI,
    handler: Handler,
    files: Files,
    batches: Batches,
    *,
    once: BatchesOnce,
    pace: Pace,
) -> None:
    """Add `/v1/files` and `/v1/batches`; `handler` says whether anything new is taken."""

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
            return _json(batch_object(await make(None)))
        mark = fingerprint(request.url.path, body)
        batch, is_new = await once.make(tenant_of(request), key, mark, make)
        response = _json(batch_object(batch))
        if not is_new:
            response.headers[REPLAYED_HEADER] = "true"
        return response

    @app.post("/v1/files")
    @_answered
    async def upload_file(request: Request) -> Response:
        handler.check_open()
        file = await files.upload(tenant_of(request), request.stream(), request.headers)
        return _json(file_object(file))

    @app.get("/v1/files")
    @_answered
    async def list_files(request: Request) -> Response:
        query = request.query_params
        page = await files.list(
            tenant_of(request),
            after=query.get("after"),
            limit=limit_of(query, MAX_FILES, MAX_FILES),
            newest_first=is_descending(query),
            purpose=query.get("purpose"),
        )
        return _listed(page, file_object)

    @app.get("/v1/files/{file_id}")
    @_answered
    async def retrieve_file(request: Request, file_id: str) -> Response:
        return _json(file_object(await files.get(tenant_of(request), file_id)))

    @app.delete("/v1/files/{file_id}")
    @_answered
    async def delete_file(request: Request, file_id: str) -> Response:
        await files.delete(tenant_of(request), file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    @app.get("/v1/files/{file_id}/content")
    @_answered
    async def file_content(request: Request, file_id: str) -> Response:
        tenant = tenant_of(request)
        file = await files.get(tenant, file_id)
        response = ContentResponse(files.store, tenant, file, request.headers.get("range"))
        await response.begin()
        return response

    @app.post("/v1/batches")
    @_answered
    async def create_batch(request: Request) -> Response:
        body = await body_of(request)
        order = order_of(fields_of(body))

        async def make(batch_id: str | None) -> BatchRecord:
            return await batches.create(tenant_of(request), order, batch_id=batch_id)

        return await made(request, body, make)

    @app.get("/v1/batches")
    @_answered
    async def list_batches(request: Request) -> Response:
        query = request.query_params
        page = await batches.list(
            tenant_of(request),
            after=query.get("after"),
            limit=limit_of(query, DEFAULT_BATCHES, MAX_BATCHES),
        )
        return _listed(page, batch_object)

    @app.get("/v1/batches/{batch_id}")
    @_answered
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        return _json(batch_object(await batches.get(tenant_of(request), batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel")
    @_answered
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        return _json(batch_object(await batches.cancel(tenant_of(request), batch_id)))

    @app.post("/v1/batches/{batch_id}/retry")
    @_answered
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


def _answered(route: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """Answer what only these routes meet; other errors are the application's to answer."""

    @functools.wraps(route)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await route(*args, **kwargs)
        except ClientDisconnect:
            error: RequestError = CancelledRequestError("the client disconnected")
        except FileGoneError as gone:
            error = NotFoundError(str(gone))
        return error_response(error, uuid.uuid4().hex)

    return answered


def _listed(page: Page[T], shown: Callable[[T], dict[str, Any]]) -> Response:
    data = [shown(record.value) for record in page.records]
    return _json(list_object(data, has_more=page.has_more))


def _json(value: object) -> Response:
    return Response(
        msgspec.json.encode(value), media_type=JSON, headers={"Cache-Control": "no-cache"}
    )
