"""Questions that one worker answers: which one is asked, and what the client gets."""

import asyncio
import json

import httpx
import pytest

from headrace.gateway.call_routes import ASKS
from headrace.gateway.pace import Pace
from headrace.shared.errors import BrokerError, NoWorkerError
from headrace.shared.messages import AskAnswer

from .conftest import NOW


def answers(body=b'{"count":1}', **fields):
    async def answer(ask):
        return AskAnswer(**{"http_status": 200, "body": body} | fields)

    return answer


def raises(error):
    async def answer(ask):
        raise error

    return answer


@pytest.mark.parametrize("path", ASKS)
async def test_the_stage_that_holds_the_code_is_asked(gateway, path):
    gateway.broker.answer = answers()
    body = b'{ "model":"m", "prompt": "\\u00e9" }'
    answer = await gateway.post(body, path=path, headers={"X-Request-Id": "q1"}).end()
    assert (answer.status, answer.body) == (200, b'{"count":1}')
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "q1"
    [(subject, ask)] = gateway.broker.asks
    stage = "derender" if path.endswith("derender") else "render"
    assert subject == f"hr.v1.{stage}.ask.m"
    assert ask.endpoint == path.strip("/").removeprefix("v1/").replace("/", ".")
    assert (ask.request_id, ask.tenant, ask.body) == ("q1", "default", body)
    assert ask.deadline == NOW + gateway.pace.ask_timeout_s
    assert gateway.broker.submissions == []


async def test_an_error_of_the_worker_reaches_the_client(gateway):
    body = b'{"error":{"message":"full","type":"TooManyRequestsError","param":null,"code":429}}'
    gateway.broker.answer = answers(body, http_status=429, retry_after_s=1.2)
    answer = await gateway.post(path="/tokenize").end()
    assert (answer.status, answer.body) == (429, body)
    assert answer.headers["retry-after"] == "2"


async def test_without_a_listener_it_is_a_503_with_advice(gateway):
    gateway.broker.answer = raises(NoWorkerError("nobody listens on hr.v1.render.ask.m"))
    answer = await gateway.post(path="/tokenize").end()
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert answer.error["message"] == "no render worker of `m` answers at the moment"
    answer = await gateway.post(path="/v1/completions/derender").end()
    assert answer.error["message"] == "no derender worker of `m` answers at the moment"


class TestDeadline:
    @pytest.fixture
    def pace(self):
        return Pace(silence_s=1e6, grace_s=1e6, ask_timeout_s=0.01)

    async def test_a_worker_that_does_not_answer_is_a_504(self, gateway, monkeypatch):
        monkeypatch.setattr("headrace.gateway.ask.ON_TIME_S", 0.01)
        answer = await gateway.post(path="/tokenize").end()
        assert answer.status == 504
        assert answer.error["message"] == "tokenize was not answered within 0.01 s"
        assert answer.error["type"] == "TimeoutError"


async def test_a_client_may_wait_for_less_and_not_for_more(gateway):
    gateway.broker.answer = answers()
    for timeout, expected in (("2", 2), ("3600", gateway.pace.ask_timeout_s)):
        await gateway.post(path="/tokenize", headers={"X-Request-Timeout": timeout}).end()
        assert gateway.broker.asks[-1][1].deadline == NOW + expected
    answer = await gateway.post(path="/tokenize", headers={"X-Request-Timeout": "soon"}).end()
    assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")


async def test_a_broker_that_is_away_is_a_503(gateway):
    gateway.broker.answer = raises(BrokerError("not connected"))
    answer = await gateway.post(path="/tokenize").end()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    gateway.broker.is_connected = False
    assert (await gateway.post(path="/tokenize").end()).status == 503


async def test_an_unreadable_answer_is_a_500(gateway):
    async def request(subject, payload, *, timeout_s):
        return b"junk"

    gateway.broker.request = request
    answer = await gateway.post(path="/tokenize").end()
    assert answer.status == 500
    assert "the answer can't be read" in answer.error["message"]


async def test_a_gateway_that_drains_asks_nobody(gateway):
    await gateway.handler.drain(1)
    answer = await gateway.post(path="/tokenize").end()
    assert (answer.status, gateway.broker.asks) == (503, [])


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, "body.1"),
        (b"", 400, "body"),
        (b"[]", 400, "body"),
        ({"model": 5}, 400, "body.model"),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_what_no_worker_could_be_found_for_is_refused(gateway, body, status, param):
    answer = await gateway.post(body, path="/tokenize").end()
    assert (answer.status, answer.error["param"]) == (status, param)
    assert gateway.broker.asks == []


async def test_a_body_is_json_of_a_limited_size(gateway):
    answer = await gateway.post({"prompt": "x" * 1_000}, path="/tokenize").end()
    assert answer.status == 413
    answer = await gateway.post(path="/tokenize", headers={"content-type": "text/plain"}).end()
    assert answer.status == 400


async def test_only_the_model_of_a_question_is_the_gateways_business(gateway):
    gateway.broker.answer = answers()
    body = {"stream": "maybe", "prompt": 5}
    assert (await gateway.post(body, path="/tokenize").end()).status == 200


async def test_a_client_that_leaves_before_its_body_is_whole_is_not_asked_for(gateway):
    answer = gateway.post(path="/tokenize", parts=[b'{"prom'], is_complete=False)
    answer.hang_up()
    await answer.end()
    assert gateway.broker.asks == []


async def test_input_tokens_of_responses_are_no_route_as_in_vllm(gateway):
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post("/v1/responses/input_tokens", json={})
    assert answer.status_code == 405


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("/v1/responses", "responses"), ("/inference/v1/generate", "generate")],
)
async def test_what_generates_travels_as_a_submission(gateway, make, path, endpoint):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    answer = await gateway.post(path=path).end()
    assert (answer.status, answer.body) == (200, b"{}")
    assert gateway.broker.submissions[0].endpoint == endpoint
    record = gateway.handler.recent.get("default", gateway.broker.submissions[0].request_id)
    assert record.endpoint == endpoint


def typed(*names):
    return tuple(json.dumps({"type": name}).encode() for name in names)


async def test_events_of_a_response_are_named_and_end_without_done(gateway, make):
    def script(s):
        chunk = make.chunk(s, 0)
        chunk = type(chunk)(request_id=s.request_id, seq=0, chunks=typed("response.created", "x"))
        gateway.broker.send(s, chunk, make.terminal(s, 1))

    gateway.broker.script = script
    answer = await gateway.post(path="/v1/responses", stream=True).end()
    assert answer.body == (
        b'event: response.created\ndata: {"type": "response.created"}\n\n'
        b'event: x\ndata: {"type": "x"}\n\n'
    )
    assert answer.done


async def test_an_error_in_a_response_is_openais_error_event(gateway, make):
    failure = b'{"error":{"message":"gone","type":"EngineError","param":"p","code":500}}'

    def script(s):
        chunk = make.chunk(s, 0)
        chunk = type(chunk)(request_id=s.request_id, seq=0, chunks=typed("a", "b"))
        end = make.terminal(s, 1, status="error", http_status=500, body=failure)
        gateway.broker.send(s, chunk, end)

    gateway.broker.script = script
    answer = await gateway.post(path="/v1/responses", stream=True).end()
    name, data = answer.body.decode().split("\n\n")[2].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "code": "EngineError",
        "message": "gone",
        "param": "p",
        "sequence_number": 2,
    }
    assert answer.body.endswith(b"}\n\n")
    assert b"[DONE]" not in answer.body


async def test_a_generated_stream_ends_with_done(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.chunk(s, 0), make.terminal(s, 1))
    answer = await gateway.post(path="/inference/v1/generate", stream=True).end()
    assert answer.events == ['{"text":"t0"}', "[DONE]"]


async def test_questions_do_not_wait_for_one_another(gateway):
    let_go = asyncio.Event()

    async def answer(ask):
        if ask.request_id == "slow":
            await let_go.wait()
        return AskAnswer(http_status=200, body=ask.request_id.encode())

    gateway.broker.answer = answer
    slow = gateway.post(path="/tokenize", headers={"X-Request-Id": "slow"})
    quick = await gateway.post(path="/tokenize", headers={"X-Request-Id": "quick"}).end()
    assert quick.body == b"quick"
    let_go.set()
    assert (await slow.end()).body == b"slow"
