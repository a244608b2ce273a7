"""The routes of calls: those that generate, and those that one worker answers. Their bodies pass through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.gateway.answering import JSON, headers_of
from headrace.gateway.ask import Asker, Question
from headrace.gateway.auth import tenant_of
from headrace.gateway.body import model_of, parse_body, read_body
from headrace.gateway.call import Order
from headrace.gateway.creating import Creations
from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import KEY_HEADER, key_of
from headrace.gateway.pace import Pace
from headrace.gateway.request_headers import request_id_of, timeout_of
from headrace.shared.messages import DerenderAsk, Endpoint, RenderAsk
from headrace.shared.submission import TRACEPARENT, valid_traceparent

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


def add_call_routes(
    app: FastAPI,
    handler: Handler,
    asker: Asker,
    creations: Creations,
    *,
    max_body_bytes: int,
    pace: Pace,
) -> None:
    """Add them. Their errors are the application's to answer: RequestError, BrokerError."""

    async def body_of(request: Request) -> bytes:
        return await read_body(
            request.stream(),
            request.headers.get("content-length"),
            max_bytes=max_body_bytes,
            timeout_s=pace.body_timeout_s,
            setting="gateway.max_body_bytes",
        )

    async def create(request: Request, endpoint: Endpoint) -> Response:
        request_id, is_own_id = request_id_of(request.scope)
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
        return await creations.create(order, key)

    async def ask(request: Request, endpoint: RenderAsk | DerenderAsk) -> Response:
        request_id, is_own_id = request_id_of(request.scope)
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


def _bound(
    route: Callable[[Request, E], Awaitable[Response]], endpoint: E
) -> Callable[[Request], Awaitable[Response]]:
    async def bound(request: Request) -> Response:
        return await route(request, endpoint)

    return bound
