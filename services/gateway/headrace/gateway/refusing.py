"""What a route raises, as the answer that its client gets: the one place for it, whatever the route."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headrace.gateway.answering import JSON, error_response, headers_of
from headrace.gateway.errors import NotFoundError, UnavailableError
from headrace.gateway.request_headers import request_id_of
from headrace.shared import metrics
from headrace.shared.errors import (
    BrokerError,
    CancelledRequestError,
    FileGoneError,
    RequestError,
)
from headrace.shared.messages import Failure
from headrace.shared.openai_errors import error_body

logger = logging.getLogger(__name__)

HTTP = "http"
"""The code of what no error of ours says: no such route, no such method."""


def answer_errors(app: FastAPI) -> None:
    """Answer errors of every route in OpenAI's form, with `X-Request-Id`; count and log what is refused."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return _refused(error, request)

    @app.exception_handler(BrokerError)
    async def unavailable(request: Request, error: BrokerError) -> Response:
        return _refused(UnavailableError(str(error)), request)

    @app.exception_handler(FileGoneError)
    async def gone(request: Request, error: FileGoneError) -> Response:
        return _refused(NotFoundError(str(error)), request)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return _refused(CancelledRequestError("the client disconnected"), request)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        note_refusal(request_id_of(request.scope)[0], HTTP, error.status_code)
        return _failed(error.status_code, error.detail, request, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return _failed(500, "Internal server error", request, {})  # the server logs the traceback


def note_refusal(
    request_id: str, code: str, http_status: int, *, action: str = "request_refused"
) -> None:
    """Count a call that is answered with an error, and log it; nothing of the call itself is in the log."""
    metrics.HTTP_REFUSED.labels(http_status, code).inc()
    logger.info(
        "request %s refused: %s, HTTP %d",
        request_id,
        code,
        http_status,
        extra={
            "action": action,
            "request_id": request_id,
            "code": code,
            "http_status": http_status,
        },
    )


def _refused(error: RequestError, request: Request) -> Response:
    request_id, _ = request_id_of(request.scope)
    note_refusal(request_id, error.code, error.http_status)
    return error_response(error, request_id)


def _failed(http_status: int, message: str, request: Request, headers: dict[str, str]) -> Response:
    phrase = HTTPStatus(http_status).phrase
    failure = Failure(code=HTTP, message=message, http_status=http_status, error_type=phrase)
    own = headers_of(request_id_of(request.scope)[0], http_status=http_status)
    return Response(
        error_body(failure), status_code=http_status, media_type=JSON, headers=own | headers
    )
