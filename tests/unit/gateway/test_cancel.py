"""`POST /requests/<id>/cancel`, and cancels that come from elsewhere."""

import json

import pytest

from headrace.gateway.link import Link
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.messages import Cancel


def cancel(gateway, request_id):
    return gateway.post(b"", path=f"/requests/{request_id}/cancel").end()


async def running(gateway, request_id="r1", **fields):
    answer = gateway.post(headers={"X-Request-Id": request_id}, **fields)
    await gateway.broker.until(
        lambda: any(s.request_id == request_id for s in gateway.broker.submissions)
    )
    return answer


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_of_this_gateway_ends_for_its_client_at_once(gateway, stream):
    answer = await running(gateway, stream=stream)
    said = await cancel(gateway, "r1")
    assert (said.status, json.loads(said.body)) == (200, {"id": "r1", "status": "cancelled"})
    await answer.end()
    assert (answer.status, answer.error["type"]) == (499, "CancelledError")
    assert {c.request_id for c in gateway.broker.cancels} == {"r1"}
    assert gateway.handler.recent.get("default", "r1").status == "cancelled"


async def test_a_stream_that_has_begun_ends_with_an_error_event(gateway, make):
    answer = await running(gateway, stream=True)
    (s,) = gateway.broker.submissions
    gateway.broker.send(s, make.chunk(s, 0))
    await answer.until(lambda: answer.writes)
    await cancel(gateway, "r1")
    await answer.end()
    assert json.loads(answer.events[-2])["error"]["code"] == 499
    assert answer.events[-1] == "[DONE]"


async def test_a_request_that_has_ended_says_how_and_nothing_is_cancelled(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post(headers={"X-Request-Id": "r1"}).end()
    said = await cancel(gateway, "r1")
    assert (said.status, json.loads(said.body)["status"]) == (200, "ok")
    assert gateway.broker.cancels == []


async def test_a_request_of_another_gateway_or_of_none_is_cancelled_wherever_it_is(gateway):
    said = await cancel(gateway, "far-away")
    assert (said.status, json.loads(said.body)["status"]) == (202, "cancelling")
    assert [(c.tenant, c.request_id) for c in gateway.broker.cancels] == [("default", "far-away")]


async def test_what_can_be_no_request_id_is_a_400(gateway):
    said = await cancel(gateway, "a.*")
    assert (said.status, said.error["param"]) == (400, "request_id")
    assert gateway.broker.cancels == []


async def test_without_a_broker_nothing_is_cancelled_and_it_is_said(gateway):
    gateway.handler._link = Link()
    assert (await cancel(gateway, "r1")).status == 503


async def test_a_cancel_from_elsewhere_ends_the_request_for_its_client(gateway):
    await gateway.handler.cancels.start(gateway.broker)
    hear = gateway.broker.handlers[subjects.cancel_all()]
    first, second = await running(gateway, "r1"), await running(gateway, "r2")
    for tenant in ("evil", "default"):
        payload = wire.encode(Cancel(request_id="r1", tenant=tenant, reason="by an operator"))
        hear(Received(subjects.cancel(tenant, "r1"), payload, {}, ""))
    await first.end()
    assert first.status == 499
    assert "by an operator" in first.error["message"]
    assert gateway.handler.num_running == 1
    second.hang_up()
    await second.end()
