"""The HTTP routes. Bodies pass through; what they mean is the pipeline's business."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Set
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headrace.gateway import models
from headrace.gateway.answering import JSON, error_response, headers_of
from headrace.gateway.ask import Asker, Question
from headrace.gateway.auth import OPEN_PATHS, Gate, is_operator, tenant_of
from headrace.gateway.body import model_of, parse_body, read_body
from headrace.gateway.call import Order
from headrace.gateway.console import assets
from headrace.gateway.console.routes import add_console
from headrace.gateway.errors import UnavailableError
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import KEY_HEADER, key_of
from headrace.gateway.keyring import Keyring
from headrace.gateway.lasting import Lasting, Terms
from headrace.gateway.link import Link
from headrace.gateway.numbered_events import END_ID, LAST_EVENT_ID
from headrace.gateway.pace import Pace
from headrace.gateway.request_headers import request_id_of, timeout_of
from headrace.gateway.response_routes import add_response_routes
from headrace.shared import metrics
from headrace.shared.errors import (
    BrokerError,
    CancelledRequestError,
    RequestError,
)
from headrace.shared.messages import DerenderAsk, Endpoint, Failure, RenderAsk
from headrace.shared.openai_errors import error_body
from headrace.shared.submission import TRACEPARENT, valid_traceparent

logger = logging.getLogger(__name__)

E = TypeVar("E")

CREATES: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/inference/v1/generate": "generate",
}
"""Calls that generate: they travel through the pipeline."""
ASKS: dict[str, RenderAsk | DerenderAsk] = {
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/chat/completions/render": "chat.completions.render",
    "/v1/completions/render": "completions.render",
    "/v1/chat/completions/derender": "chat.completions.derender",
    "/v1/completions/derender": "completions.derender",
}
"""Calls that one worker answers."""


def create_app(
    link: Link,
    handler: Handler,
    asker: Asker,
    *,
    keyring: Keyring,
    tenant: str,
    operators: Set[str] = frozenset(),
    max_body_bytes: int,
    pace: Pace,
    lasting: Lasting | None = None,
) -> FastAPI:
    """Return the ASGI application; `tenant` is whose the requests are while no key is needed.

    `operators`: tenants whose keys also see where the workers run.
    """
    app = FastAPI(title="headrace", openapi_url=None)
    started = int(time.time())
    lasting = lasting or Lasting(link, handler, Terms())
    _handle_errors(app)
    page = assets.load()
    app.add_middleware(
        Gate,
        keyring=keyring,
        tenant=tenant,
        operators=operators,
        open_paths=OPEN_PATHS | page.keys(),
    )

    async def body_of(request: Request) -> bytes:
        return await read_body(
            request.stream(),
            request.headers.get("content-length"),
            max_bytes=max_body_bytes,
            timeout_s=pace.body_timeout_s,
        )

    async def create(request: Request, endpoint: Endpoint) -> Response:
        request_id, is_own_id = request_id_of(request.headers)
        try:
            body = await body_of(request)
            fields = parse_body(body, request.headers.get("content-type", ""))
            order = Order(
                request_id=request_id,
                tenant=tenant_of(request),
                is_own_id=is_own_id,
                endpoint=endpoint,
                model=fields.model,
                stream=fields.stream,
                body=body,
                timeout_s=timeout_of(request.headers) or fields.timeout_s,
                traceparent=valid_traceparent(request.headers.get(TRACEPARENT)),
            )
            key = key_of(request.headers.getlist(KEY_HEADER))
            return await lasting.creations.create(order, key)
        except ClientDisconnect:
            return _refused(CancelledRequestError("the client disconnected"), request_id)
        except RequestError as error:
            return _refused(error, request_id)

    async def ask(request: Request, endpoint: RenderAsk | DerenderAsk) -> Response:
        request_id, is_own_id = request_id_of(request.headers)
        try:
            body = await body_of(request)
            handler.check_open()
            question = Question(
                request_id=request_id,
                tenant=tenant_of(request),
                is_own_id=is_own_id,
                endpoint=endpoint,
                model=model_of(body, request.headers.get("content-type", "")),
                body=body,
                timeout_s=timeout_of(request.headers),
            )
            answer = await asker.ask(question)
        except ClientDisconnect:
            return _refused(CancelledRequestError("the client disconnected"), request_id)
        except RequestError as error:
            return _refused(error, request_id)
        return Response(
            answer.body,
            status_code=answer.http_status,
            media_type=JSON,
            headers=headers_of(request_id, answer.retry_after_s, http_status=answer.http_status),
        )

    for path, endpoint in CREATES.items():
        app.post(path)(_bound(create, endpoint))
    for path, question in ASKS.items():
        app.post(path)(_bound(ask, question))

    add_response_routes(app, lasting.responses, lasting.readings, handler, pace=pace)

    @app.get("/v1/models")
    async def list_models() -> Response:
        try:
            return _json(models.model_list(link.workers, started))
        except BrokerError as error:
            return error_response(UnavailableError(str(error)), uuid.uuid4().hex)

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if not name:  # `/v1/models/`
            return await list_models()
        try:
            return _json(models.model_card(link.workers, name, started))
        except BrokerError as error:
            return error_response(UnavailableError(str(error)), uuid.uuid4().hex)
        except RequestError as error:
            return error_response(error, uuid.uuid4().hex)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        if handler.is_draining:
            return _json({"status": "draining", "models": {}}, 503)
        try:
            is_ready, report = models.readiness(link.workers)
        except BrokerError as error:
            return _json({"status": str(error), "models": {}}, 503)
        return _json(report, 200 if is_ready else 503)

    @app.get("/workers")
    async def list_workers(request: Request) -> Response:
        try:
            return _json(models.worker_list(link.workers, is_operator(request)))
        except BrokerError as error:
            return error_response(UnavailableError(str(error)), uuid.uuid4().hex)

    @app.get("/requests/{request_id}")
    async def recent_request(request: Request, request_id: str) -> Response:
        record = handler.recent.get(tenant_of(request), request_id)
        if record is None:
            raise HTTPException(404, f"The request `{request_id}` is not among the recent ones.")
        return _json(record)

    @app.get("/requests/{request_id}/events")
    async def request_events(request: Request, request_id: str) -> Response:
        after = request.headers.get(LAST_EVENT_ID)
        if after == END_ID:
            return Response(status_code=204)  # which tells a browser not to come again
        return await lasting.readings.events(tenant_of(request), request_id, after)

    @app.post("/requests/{request_id}/cancel")
    async def cancel_request(request: Request, request_id: str) -> Response:
        try:
            status = await handler.cancel(tenant_of(request), request_id)
        except RequestError as error:
            return _refused(error, request_id)
        answer = {"id": request_id, "status": status}
        return _json(answer, 202 if status == "cancelling" else 200)

    add_console(
        app,
        link,
        handler,
        version=headrace_version(),
        needs_key=lambda: keyring.is_on,
        files=page,
    )

    @app.get("/version")
    async def show_version() -> Response:
        return _json({"version": headrace_version()})

    return app


def _bound(
    route: Callable[[Request, E], Awaitable[Response]], endpoint: E
) -> Callable[[Request], Awaitable[Response]]:
    async def bound(request: Request) -> Response:
        return await route(request, endpoint)

    return bound


def headrace_version() -> str:
    """Return the installed version."""
    try:
        return version("headrace")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _failed(error.status_code, error.detail, dict(error.headers or {}))

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return error_response(error, request_id_of(request.headers)[0])

    @app.exception_handler(BrokerError)
    async def broker_error(request: Request, error: BrokerError) -> Response:
        return error_response(UnavailableError(str(error)), request_id_of(request.headers)[0])

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        return _failed(500, "Internal server error", {})  # the server logs it, with the traceback


def _failed(http_status: int, message: str, headers: dict[str, str]) -> Response:
    phrase = HTTPStatus(http_status).phrase
    failure = Failure(code="http", message=message, http_status=http_status, error_type=phrase)
    return Response(error_body(failure), status_code=http_status, media_type=JSON, headers=headers)


def _refused(error: RequestError, request_id: str) -> Response:
    metrics.HTTP_REFUSED.labels(error.http_status, error.code).inc()
    logger.info(
        "request %s refused: %s, HTTP %d",
        request_id,
        error.code,
        error.http_status,
        extra={
            "action": "request_refused",
            "request_id": request_id,
            "code": error.code,
            "http_status": error.http_status,
        },
    )
    return error_response(error, request_id)


def _json(value: object, http_status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(value),
        status_code=http_status,
        media_type=JSON,
        headers={"Cache-Control": "no-cache"},
    )
