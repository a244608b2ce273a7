"""The routes that tell how it stands: of models, workers and this gateway's requests, which are cancelled here, too."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.gateway import models
from headrace.gateway.answering import json_response
from headrace.gateway.auth import is_operator, tenant_of
from headrace.gateway.handler import Handler
from headrace.gateway.link import Link
from headrace.gateway.numbered_events import END_ID, LAST_EVENT_ID
from headrace.gateway.reading import Readings
from headrace.shared.errors import BrokerError


def add_status_routes(
    app: FastAPI, link: Link, handler: Handler, readings: Readings, *, version: str
) -> None:
    """Add them. Their errors are the application's to answer: RequestError, BrokerError."""
    _add_service_routes(app, link, handler, version)
    _add_request_routes(app, handler, readings)


def _add_service_routes(app: FastAPI, link: Link, handler: Handler, version: str) -> None:
    started = int(time.time())

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(models.model_list(link.workers, started))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if not name:  # `/v1/models/`
            return await list_models()
        return json_response(models.model_card(link.workers, name, started))

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        if handler.is_draining:
            return json_response({"status": "draining", "models": {}}, 503)
        try:
            is_ready, report = models.readiness(link.workers)
        except BrokerError as error:
            return json_response({"status": str(error), "models": {}}, 503)
        return json_response(report, 200 if is_ready else 503)

    @app.get("/workers")
    async def list_workers(request: Request) -> Response:
        return json_response(models.worker_list(link.workers, is_operator(request)))

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version})


def _add_request_routes(app: FastAPI, handler: Handler, readings: Readings) -> None:
    @app.get("/requests/{request_id}")
    async def recent_request(request: Request, request_id: str) -> Response:
        record = handler.recent.get(tenant_of(request), request_id)
        if record is None:
            raise HTTPException(404, f"The request `{request_id}` is not among the recent ones.")
        return json_response(record)

    @app.get("/requests/{request_id}/events")
    async def request_events(request: Request, request_id: str) -> Response:
        after = request.headers.get(LAST_EVENT_ID)
        if after == END_ID:
            return Response(status_code=204)  # which tells a browser not to come again
        return await readings.events(tenant_of(request), request_id, after)

    @app.post("/requests/{request_id}/cancel")
    async def cancel_request(request: Request, request_id: str) -> Response:
        status = await handler.cancel(tenant_of(request), request_id)
        answer = {"id": request_id, "status": status}
        return json_response(answer, 202 if status == "cancelling" else 200)
