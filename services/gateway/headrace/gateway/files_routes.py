"""The HTTP routes of files."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.gateway.answering import json_response
from headrace.gateway.auth import tenant_of
from headrace.gateway.batches_view import file_object
from headrace.gateway.files import MAX_LIST, Files
from headrace.gateway.files_content import ContentResponse
from headrace.gateway.handler import Handler
from headrace.gateway.paging import is_descending, limit_of, list_object


def add_files_routes(app: FastAPI, handler: Handler, files: Files) -> None:
    """Add `/v1/files`; `handler` says whether anything new is taken.

    Their errors are the application's to answer: RequestError, BrokerError, FileGoneError.
    """

    @app.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        handler.check_open()
        file = await files.upload(tenant_of(request), request.stream(), request.headers)
        return json_response(file_object(file))

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        query = request.query_params
        page = await files.list(
            tenant_of(request),
            after=query.get("after"),
            limit=limit_of(query, MAX_LIST, MAX_LIST),
            newest_first=is_descending(query),
            purpose=query.get("purpose"),
        )
        data = [file_object(record.value) for record in page.records]
        return json_response(list_object(data, has_more=page.has_more))

    @app.get("/v1/files/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Response:
        return json_response(file_object(await files.get(tenant_of(request), file_id)))

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        await files.delete(tenant_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @app.get("/v1/files/{file_id}/content")
    async def file_content(request: Request, file_id: str) -> Response:
        tenant = tenant_of(request)
        file = await files.get(tenant, file_id)
        response = ContentResponse(files.store, tenant, file, request.headers.get("range"))
        await response.begin()
        return response
