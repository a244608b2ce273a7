"""Every error of every route is answered in one form, and counted."""

import re

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from headrace.gateway.refusing import answer_errors
from headrace.gateway.request_headers import request_id_of
from headrace.gateway.service import Gateway
from headrace.shared.errors import BadRequestError, BrokerError, FileGoneError, QueueFullError
from headrace.shared.settings import GatewaySettings, Settings

ALWAYS_ANSWERED = {"/health", "/version", "/v1/webhook_event_types"}
OWN_FORM = {"/ready"}  # it says what is missing


def client_of(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def num_refused(code, error):
    labels = {"code": str(code), "error": error}
    return REGISTRY.get_sample_value("headrace_http_refused_requests_total", labels) or 0


@pytest.fixture
def whole():
    """The application as it is served, at a broker that was never reached."""
    settings = Settings(gateway=GatewaySettings(max_connections=1))
    return Gateway(settings, instance="gateway-test")._server().config.app


async def test_without_a_broker_every_route_names_the_request_that_it_could_not_serve(whole):
    routes = [
        (method, re.sub(r"\{.*?\}", "x", route.path))
        for route in whole._app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    ]
    errors = 0
    async with client_of(whole) as client:
        for method, path in routes:
            named = {"X-Request-Id": "mine", "content-type": "application/json"}
            answer = await client.request(method, path, headers=named)
            if path in ALWAYS_ANSWERED | OWN_FORM or path.startswith("/console"):
                continue
            errors += 1
            assert answer.status_code >= 400, path
            assert answer.headers["x-request-id"] == "mine", path
            assert answer.json()["error"]["code"] == answer.status_code, path
    assert errors > 30


async def test_what_is_no_route_names_the_request_too_and_is_counted(whole):
    before = num_refused(404, "http") + num_refused(405, "http")
    async with client_of(whole) as client:
        for method, path in (("GET", "/v1/nothing"), ("GET", "/v1/chat/completions")):
            answer = await client.request(method, path, headers={"X-Request-Id": "mine"})
            assert answer.headers["x-request-id"] == "mine"
            assert len((await client.request(method, path)).headers["x-request-id"]) == 32
    assert num_refused(404, "http") + num_refused(405, "http") == before + 4


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (BadRequestError("wrong"), 400, "bad_request"),
        (FileGoneError("part 3 is not there"), 404, "not_found"),
        (QueueFullError("full", retry_after_s=3), 429, "queue_full"),
        (ClientDisconnect(), 499, "cancelled"),
        (BrokerError("no ack within 5 s"), 503, "unavailable"),
    ],
)
async def test_an_error_is_answered_and_counted_whatever_route_raises_it(error, status, name):
    app = FastAPI()
    answer_errors(app)

    @app.get("/")
    async def route():
        raise error

    before = num_refused(status, name)
    async with client_of(app) as client:
        answer = await client.get("/", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    assert answer.json()["error"]["code"] == status
    assert str(error) in answer.json()["error"]["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert num_refused(status, name) == before + 1


async def test_what_nobody_foresaw_names_the_request_and_nothing_else():
    app = FastAPI()
    answer_errors(app)

    @app.get("/")
    async def route():
        raise ZeroDivisionError("inside")

    async with client_of(app) as client:
        answer = await client.get("/", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "inside" not in answer.text


def test_a_request_has_one_id_however_often_it_is_asked_for():
    scope = {"type": "http", "headers": []}
    assert request_id_of(scope) == request_id_of(scope)
    assert len(request_id_of(scope)[0]) == 32


async def test_the_log_of_a_refusal_has_the_id_of_its_answer(whole, caplog):
    caplog.set_level("INFO")
    async with client_of(whole) as client:
        answer = await client.post("/v1/completions", json={"model": "m"})
    (record,) = [r for r in caplog.records if getattr(r, "action", "") == "request_refused"]
    assert record.request_id == answer.headers["x-request-id"]
