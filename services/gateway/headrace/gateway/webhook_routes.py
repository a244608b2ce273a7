"""`/v1/webhook_endpoints`, in the shapes of OpenAI's API; `…/deliveries` is headrace's own."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from headrace.gateway.answering import json_response
from headrace.gateway.auth import tenant_of
from headrace.gateway.body import read_body
from headrace.gateway.paging import limit_of, list_object
from headrace.gateway.webhook_endpoints import Change, WebhookEndpoints
from headrace.shared.errors import BadRequestError
from headrace.shared.webhooks.endpoints import EVENT_TYPES, Endpoint, Sending

ROOT = "/v1/webhook_endpoints"
TYPES = "/v1/webhook_event_types"
MAX_BODY_BYTES = 64 * 2**10
BODY_TIMEOUT_S = 30.0
DEFAULT_LIST = 20
MAX_LIST = 100

S = TypeVar("S")


class _Rotation(msgspec.Struct):
    keep_old_secret_active_for_24_hours: bool = False


class _Test(msgspec.Struct):
    event_type: str


def add_webhook_endpoints(app: FastAPI, endpoints: WebhookEndpoints) -> None:
    """Add the routes. Their errors are the application's to answer: RequestError, BrokerError."""

    @app.post(ROOT)
    async def create(request: Request) -> Response:
        made = await endpoints.create(tenant_of(request), await _read(request, Change))
        return json_response(_shown(made) | {"signing_secret": made.secret})

    @app.get(ROOT)
    async def show_all(request: Request) -> Response:
        query = request.query_params
        limit = limit_of(query, DEFAULT_LIST, MAX_LIST)
        page = await endpoints.list(tenant_of(request), after=query.get("after"), limit=limit)
        data = [_shown(record.value) for record in page.records]
        return json_response(list_object(data, has_more=page.has_more))

    @app.get(TYPES)
    async def show_types(request: Request) -> Response:
        return json_response({"object": "list", "data": EVENT_TYPES})

    @app.get(f"{ROOT}/{{endpoint_id}}")
    async def show(request: Request) -> Response:
        return json_response(_shown(await endpoints.get(tenant_of(request), _id(request))))

    @app.post(f"{ROOT}/{{endpoint_id}}")
    async def update(request: Request) -> Response:
        wanted = await _read(request, Change)
        changed = await endpoints.update(tenant_of(request), _id(request), wanted)
        return json_response(_shown(changed))

    @app.delete(f"{ROOT}/{{endpoint_id}}")
    async def delete(request: Request) -> Response:
        await endpoints.delete(tenant_of(request), _id(request))
        gone = {"id": _id(request), "object": "webhook_endpoint.deleted", "deleted": True}
        return json_response(gone)

    @app.post(f"{ROOT}/{{endpoint_id}}/rotate_secret")
    async def rotate_secret(request: Request) -> Response:
        wanted = await _read(request, _Rotation)
        keep_old = wanted.keep_old_secret_active_for_24_hours
        made = await endpoints.rotate_secret(tenant_of(request), _id(request), keep_old=keep_old)
        return json_response(_shown(made) | {"signing_secret": made.secret})

    @app.post(f"{ROOT}/{{endpoint_id}}/test")
    async def test(request: Request) -> Response:
        wanted = await _read(request, _Test)
        attempt = await endpoints.test(tenant_of(request), _id(request), wanted.event_type)
        told = {
            "object": "webhook_endpoint.test",
            "webhook_endpoint_id": _id(request),
            "event_type": wanted.event_type,
            "status_code": attempt.status_code,
            "success": True,
        }
        return json_response(told)

    @app.get(f"{ROOT}/{{endpoint_id}}/deliveries")
    async def deliveries(request: Request) -> Response:
        found = await endpoints.sendings(tenant_of(request), _id(request))
        return json_response({"object": "list", "data": [_sent(sending) for sending in found]})


async def _read(request: Request, kind: type[S]) -> S:
    """Return the JSON body. Raises: RequestError."""
    body = await read_body(
        request.stream(),
        request.headers.get("content-length"),
        max_bytes=MAX_BODY_BYTES,
        timeout_s=BODY_TIMEOUT_S,
    )
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not what it should be: {error}") from None


def _id(request: Request) -> str:
    found: str = request.path_params["endpoint_id"]
    return found


def _shown(endpoint: Endpoint) -> dict[str, Any]:
    """The secret itself is shown where it is made, and nowhere else."""
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": f"whsec_…{endpoint.secret[-4:]}",
        "disabled": endpoint.disabled,
    }


def _sent(sending: Sending) -> dict[str, Any]:
    return {"object": "webhook_delivery"} | msgspec.structs.asdict(sending)
