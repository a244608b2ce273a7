"""What is refused before anything is published, or because the broker refused it."""

import json

import pytest

from headrace.gateway.body import parse_body, read_body
from headrace.gateway.errors import InvalidBodyError
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.shared.errors import BrokerError, PayloadTooLargeError, QueueFullError
from headrace.shared.subjects import Role


async def test_a_body_that_is_no_json_is_refused_as_vllm_does(gateway):
    answer = await gateway.post(b'{"model": }').end()
    assert answer.status == 400
    assert answer.error == {
        "message": "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.10', 'msg':"
        " 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
        "type": "Bad Request",
        "param": "body.10",
        "code": 400,
    }
    assert gateway.broker.submissions == []


@pytest.mark.parametrize(
    ("body", "word", "param"),
    [
        (b"", "Field required", "body"),
        (b"null", "Field required", "body"),
        (b"[1]", "'input': '<list of 1 items>'", "body"),
        (b'"' + b"x" * 300 + b'"', "x" * 200 + "...[truncated]'", "body"),
        (b'"text"', "valid dictionary", "body"),
        (b'{"model": {}}', "'input': '<dict of 0 items>'", "body.model"),
        (b'{"stream": "perhaps"}', "'input': 'perhaps'", "body.stream"),
        (b'{"stream": []}', "valid boolean", "body.stream"),
        (b'{"model": "m"} x', "Extra data", "body.15"),
        (b'{"a":' + b"[" * 900, "error", "body.905"),
        (b'{"model": "\xff"}', "parsing the body", None),
    ],
)
async def test_a_body_of_the_wrong_kind_is_refused(gateway, body, word, param):
    answer = await gateway.post(body).end()
    assert (answer.status, answer.error["type"]) == (400, "Bad Request")
    assert word in answer.error["message"]
    assert answer.error["param"] == param


def test_a_body_nested_beyond_all_measure_is_refused():
    with pytest.raises(InvalidBodyError, match="nested too deeply: 1,000 levels"):
        parse_body(b'{"a":' + b"[" * 200_000, "application/json")


@pytest.mark.parametrize(
    "body",
    [b"[" * 300_000, b'{"stream": ' + b"9" * 5_000 + b"}", b'{"model": 1e999}'],
    ids=["nested", "digits", "infinite"],
)
def test_a_body_that_breaks_behind_the_first_look_is_refused(body):
    with pytest.raises(InvalidBodyError):
        parse_body(body, "application/json")


async def test_another_media_type_is_refused(gateway):
    answer = await gateway.post(headers={"content-type": "text/plain"}).end()
    assert answer.status == 400
    assert "Only 'application/json' is allowed" in answer.error["message"]


@pytest.mark.parametrize("value", [True, 1, "true", "ON"])
async def test_stream_is_understood_as_pydantic_does(gateway, make, value):
    def script(s):
        gateway.broker.send(s, make.chunk(s, 0), make.terminal(s, 1))

    gateway.broker.script = script
    answer = await gateway.post(stream=value).end()
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_body_over_the_limit_is_refused_by_its_length(gateway):
    answer = await gateway.post(parts=[b"never read"], headers={"content-length": "1001"}).end()
    assert answer.status == 413
    assert answer.error["type"] == "PayloadTooLargeError"
    assert "1,001 bytes" in answer.error["message"]
    assert "gateway.max_body_bytes" in answer.error["message"]


@pytest.mark.parametrize("headers", [{}, {"content-length": "10"}, {"content-length": "-1"}])
async def test_a_body_over_the_limit_is_refused_whatever_its_length_says(gateway, headers):
    answer = await gateway.post(parts=[b"x" * 600, b"x" * 600, b"x"], headers=headers).end()
    assert answer.status == 413


async def no_parts():
    for part in ():
        yield part


async def test_a_limit_that_no_setting_lifts_names_none():
    with pytest.raises(PayloadTooLargeError) as refused:
        await read_body(no_parts(), "11", max_bytes=10, timeout_s=1)
    assert str(refused.value).endswith("the limit is 10 bytes")


async def test_a_body_of_just_the_limit_is_taken(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    body = json.dumps({"model": "m", "x": ""}).encode()
    body = body.replace(b'""', b'"' + b"x" * (1_000 - len(body)) + b'"')
    assert len(body) == 1_000
    assert (await gateway.post(body).end()).status == 200


class TestSlowBody:
    @pytest.fixture
    def pace(self):
        return Pace(body_timeout_s=0.01)

    async def test_a_body_that_does_not_come_is_refused(self, gateway):
        answer = await gateway.post(parts=[b'{"model":'], is_complete=False).end()
        assert (answer.status, answer.error["code"]) == (408, 408)
        assert "within 0.01 s" in answer.error["message"]


async def test_an_unknown_model_is_a_404_as_in_vllm(gateway):
    answer = await gateway.post(model="x").end()
    assert answer.status == 404
    assert answer.error == {
        "message": "The model `x` does not exist. Valid aliases: m.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


async def test_a_request_that_names_no_model_means_the_only_one(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    assert (await gateway.post({"prompt": "x"}).end()).status == 200
    assert gateway.broker.submissions[0].slug == "m"


async def test_a_request_that_names_no_model_is_refused_where_there_are_two(gateway, make):
    gateway.workers.beats.append(make.beat(Role.DECODE, "other"))
    answer = await gateway.post({"prompt": "x"}).end()
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "m, other" in answer.error["message"]


async def test_without_any_worker_requests_are_answered_503(gateway, make):
    gateway.workers.beats[:] = [make.beat(Role.GATEWAY, "")]
    answer = await gateway.post().end()
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")


async def test_a_full_queue_is_a_429_that_says_when_to_try_again(gateway):
    gateway.broker.refuse = QueueFullError("10,000 requests wait", retry_after_s=3)
    answer = await gateway.post(headers={"X-Request-Id": "r1"}).end()
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    assert answer.error["message"] == "10,000 requests wait"
    assert gateway.handler.num_running == 0
    await gateway.broker.until(lambda: not gateway.broker.handlers)
    assert gateway.broker.cancels == []


async def test_a_request_that_was_refused_can_be_sent_again_with_the_same_id(gateway, make):
    gateway.broker.refuse = QueueFullError("full")
    await gateway.post(headers={"X-Request-Id": "r1"}).end()
    gateway.broker.refuse = None
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    assert (await gateway.post(headers={"X-Request-Id": "r1"}).end()).status == 200


async def test_a_broker_that_does_not_answer_is_a_503_and_the_request_is_cancelled(gateway):
    gateway.broker.refuse = BrokerError("no ack within 5 s")
    answer = await gateway.post().end()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "no ack within 5 s" in answer.error["message"]
    await gateway.broker.until(lambda: gateway.broker.cancels)


async def test_a_broker_that_is_away_is_a_503(gateway):
    gateway.broker.is_connected = False
    assert (await gateway.post().end()).status == 503


async def test_a_broker_that_was_never_reached_is_a_503(gateway):
    gateway.handler._link = Link()
    assert (await gateway.post().end()).status == 503


async def test_a_request_id_that_fits_no_subject_is_replaced(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    answer = await gateway.post(headers={"X-Request-Id": "a.*"}).end()
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "86401"])
async def test_a_timeout_that_is_none_is_refused(gateway, value):
    answer = await gateway.post(headers={"X-Request-Timeout": value}).end()
    assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize("value", ["5", 0, -1, True, 86_401, []])
async def test_a_timeout_in_the_body_that_is_none_is_refused(gateway, value):
    answer = await gateway.post(request_timeout=value).end()
    assert (answer.status, answer.error["param"]) == (400, "request_timeout")


async def test_a_request_id_is_not_used_twice(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post(headers={"X-Request-Id": "r1"}).end()
    answer = await gateway.post(headers={"X-Request-Id": "r1"}).end()
    assert (answer.status, answer.error["type"]) == (409, "ConflictError")
    assert answer.headers["x-should-retry"] == "false"
    assert len(gateway.broker.submissions) == 1


async def test_the_request_id_of_a_running_request_is_refused(gateway, make):
    running = gateway.post(headers={"X-Request-Id": "r1"})
    await gateway.broker.until(lambda: gateway.broker.submissions)
    assert (await gateway.post(headers={"X-Request-Id": "r1"}).end()).status == 409
    (s,) = gateway.broker.submissions
    gateway.broker.send(s, make.terminal(s, body=b"{}"))
    assert (await running.end()).status == 200


async def test_a_request_id_that_another_gateway_used_is_refused(gateway, make):
    gateway.broker.is_new = False
    answer = await gateway.post(headers={"X-Request-Id": "r1"}).end()
    assert answer.status == 409
    assert gateway.broker.cancels == []


async def test_the_answer_of_an_earlier_request_is_never_taken(gateway, make):
    earlier = type("S", (), {"tenant": "default", "request_id": "r1"})()
    gateway.broker.send(earlier, make.terminal(earlier, body=b'{"id":"earlier"}'))
    answer = await gateway.post(headers={"X-Request-Id": "r1"}).end()
    assert answer.status == 409
    assert gateway.broker.submissions == []


async def test_a_message_id_seen_before_is_no_conflict_where_the_id_is_new(gateway, make):
    gateway.broker.is_new = False  # the broker layer published it twice: the first ack was lost
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    assert (await gateway.post().end()).status == 200
