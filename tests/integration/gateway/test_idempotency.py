"""The same call again, with its Idempotency-Key: over real HTTP, at a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import httpx
import pytest

from headrace.gateway.handler import Handler
from headrace.gateway.idempotency import Idempotency
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Cancel, Chunk, Takeover
from headrace.shared.submission import Submission

from .conftest import RunningGateway, Stages

WATCHDOG_S = 60.0
BODY = b'{"id":"x"}'
FAILURE = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": uuid.uuid4().hex}


async def no_more(stages: Stages, submission: Submission, answer: httpx.Response) -> None:
    """Assert that a call was answered as the first one, and by it."""
    assert answer.headers["x-request-id"] == submission.request_id
    assert answer.headers["idempotent-replayed"] == "true"


async def test_a_repeated_call_gets_the_first_ones_answer(
    gateway, stages, start_gateway, broker_settings, key
):
    first = gateway.post(stages.model, headers=key)
    s = await stages.take()
    assert s.keeps_result
    assert s.reader is None
    again = await gateway.post(stages.model, headers=key)
    assert again.status_code == 409
    assert again.headers["retry-after"] == "1"
    assert "x-should-retry" not in again.headers
    await stages.end_kept(s, body=BODY)
    answer = await first
    assert (answer.status_code, answer.content) == (200, BODY)
    assert "idempotent-replayed" not in answer.headers
    async with start_gateway(broker_settings) as other:
        await other.until_ready(stages.model)
        for gate in (gateway, other):
            again = await gate.post(stages.model, headers=key)
            assert (again.status_code, again.content) == (200, BODY)
            await no_more(stages, s, again)


async def test_an_error_is_repeated_as_it_was(gateway, stages, key):
    first = gateway.post(stages.model, headers=key)
    s = await stages.take()
    await stages.end_kept(s, status="error", http_status=400, body=FAILURE)
    for answer in (await first, await gateway.post(stages.model, headers=key)):
        assert (answer.status_code, answer.content) == (400, FAILURE)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_that_asks_for_another_try_leaves_the_key_to_it(gateway, stages, key, stream):
    again: dict[str, Any] = {"status": "error", "http_status": 503, "body": FAILURE}
    first = gateway.post(stages.model, headers=key, stream=stream)
    s = await stages.take()
    await stages.end_kept(s, retry_after_s=1.0, **again)
    assert ((await first).status_code, (await first).headers["retry-after"]) == (503, "1")
    second = gateway.post(stages.model, headers=key, stream=stream)
    t = await stages.take()
    assert t.request_id != s.request_id
    if stream:
        await stages.chunk(t, 0, "a")
    await stages.end_kept(t, int(stream), body=b"" if stream else BODY)
    assert (await second).status_code == 200
    last = await gateway.post(stages.model, headers=key, stream=stream)
    assert (last.content, last.headers["x-request-id"]) == ((await second).content, t.request_id)


async def test_a_key_is_good_for_one_body_and_one_path(gateway, stages, key):
    first = gateway.post(stages.model, headers=key)
    s = await stages.take()
    other = await gateway.post(stages.model, headers=key, temperature=1)
    assert other.status_code == 422
    body = {"model": stages.model, "messages": []}
    other = await gateway.client.post("/v1/completions", json=body, headers=key)
    assert other.status_code == 422
    await stages.end_kept(s, body=BODY)
    assert (await first).status_code == 200


async def test_a_key_that_is_too_long_or_empty_is_refused(gateway, stages):
    for wrong in ("x" * 256, "", "ä".encode()):
        answer = await gateway.post(stages.model, headers={"Idempotency-Key": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Idempotency-Key"


async def test_of_many_calls_at_once_one_is_submitted(
    gateway, stages, start_gateway, broker_settings, key
):
    async with start_gateway(broker_settings) as other:
        await other.until_ready(stages.model)
        gates = (gateway, other)
        calls = [gates[i % 2].post(stages.model, headers=key) for i in range(10)]
        s = await stages.take()
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        while len(waiting) > 1:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (first,) = waiting
        assert {call.result().status_code for call in calls if call is not first} == {409}
        await stages.end_kept(s, body=BODY)
        assert (await first).content == BODY
        # What is submitted next is the next one taken: nothing was behind the first.
        last = gateway.post(stages.model)
        t = await stages.take()
        assert t.request_id != s.request_id
        assert not t.keeps_result
        await stages.end(t, body=BODY)
        await last


async def test_a_client_that_leaves_does_not_end_what_has_a_key(gateway, stages, key):
    first = gateway.post(stages.model, headers=key)
    s = await stages.take()
    first.cancel()
    plain = gateway.post(stages.model)
    t = await stages.take()
    plain.cancel()
    cancels: list[Cancel] = []
    async with asyncio.timeout(WATCHDOG_S):
        while not any(cancel.request_id == t.request_id for cancel in cancels):
            cancels.append(await stages.cancels.get())
    assert all(cancel.request_id != s.request_id for cancel in cancels)
    cancelled = await gateway.client.post(f"/requests/{s.request_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (202, "cancelling")
    await stages.cancel_of(s)
    await stages.end_kept(s, body=BODY)
    again = await gateway.post(stages.model, headers=key)
    assert (again.status_code, again.content) == (200, BODY)


async def test_a_call_with_a_key_that_is_cancelled_by_its_id_ends(gateway, stages, key):
    first = gateway.post(stages.model, headers=key)
    s = await stages.take()
    await gateway.client.post(f"/requests/{s.request_id}/cancel")
    await stages.cancel_of(s)
    await stages.cancel_of(s)  # until the pipeline has ended it
    await stages.end_kept(s, status="cancelled", http_status=499, body=FAILURE)
    assert (await first).status_code == 499


async def test_a_call_that_was_not_accepted_frees_its_key(gateway, stages, key):
    refused = await gateway.post("nobody-serves-this", headers=key)
    assert refused.status_code == 404
    call = gateway.post(stages.model, headers=key)
    s = await stages.take()
    await stages.end_kept(s, body=BODY)
    assert (await call).status_code == 200


async def test_a_gateway_that_ended_before_it_submitted_leaves_that_to_the_next(
    gateway, stages, key, monkeypatch
):
    """Its record is there, and no request; or the request, and nothing says so."""

    async def lost(handler: Handler, order: Any) -> Any:
        raise BrokerError("it was killed here")

    async def not_released(*args: Any) -> None:
        return

    with monkeypatch.context() as patch:
        patch.setattr(Handler, "open", lost)
        patch.setattr(Idempotency, "release", not_released)
        assert (await gateway.post(stages.model, headers=key)).status_code == 503
    again = await gateway.post(stages.model, headers=key)
    assert again.status_code == 409
    s = await stages.take()
    assert (await gateway.post(stages.model, headers=key)).status_code == 409
    await stages.end_kept(s, body=BODY)
    again = await gateway.post(stages.model, headers=key)
    assert (again.status_code, again.content) == (200, BODY)


async def test_tenants_do_not_share_keys(stages, start_gateway, broker_settings, key):
    async with start_gateway(
        broker_settings, api_keys="a:key-of-a-0000000000, b:key-of-b-0000000000"
    ) as gate:
        auth = [key | {"Authorization": f"Bearer key-of-{t}-0000000000"} for t in "ab"]
        await gate.until_ready(stages.model)
        calls = [gate.post(stages.model, headers=headers) for headers in auth]
        taken = [await stages.take(), await stages.take()]
        assert {s.tenant for s in taken} == {"a", "b"}
        for s in taken:
            await stages.end_kept(s, body=f'{{"id":"{s.tenant}"}}'.encode())
        assert [(await call).json()["id"] for call in calls] == ["a", "b"]
        s = next(s for s in taken if s.tenant == "a")
        answer = await gate.client.get(f"/requests/{s.request_id}/events", headers=auth[1])
        assert answer.status_code == 404


class Reader:
    """Reads server-sent events as a browser does, and may be cut off anywhere."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway = gateway
        self.data: list[str] = []
        self.last_id: str | None = None

    async def read(self, method: str, path: str, *, until: int | None = None, **more: Any) -> int:
        """Take events until so many are there, or to the end; return the status."""
        headers = more.pop("headers", {})
        if self.last_id is not None:
            headers = headers | {"Last-Event-ID": self.last_id}
        async with (
            asyncio.timeout(WATCHDOG_S),
            self._gateway.client.stream(method, path, headers=headers, **more) as response,
            contextlib.aclosing(response.aiter_lines()) as lines,
        ):
            event_id = None
            async for line in lines:
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    self.data.append(line.removeprefix("data: "))
                    self.last_id = event_id
                    if until is not None and len(self.data) == until:
                        break
            return response.status_code


async def streaming(gateway: RunningGateway, stages: Stages, key: dict[str, str]) -> Any:
    """Start a stream of which a client gets two events of four, and is cut off."""
    reader = Reader(gateway)
    body = {"model": stages.model, "messages": [], "stream": True}
    reading = asyncio.create_task(
        reader.read("POST", "/v1/chat/completions", json=body, headers=key, until=2)
    )
    s = await stages.take()
    await stages.chunk(s, 0, "a")
    await stages.chunk(s, 1, "b", "c")
    assert await reading == 200
    assert reader.last_id == "1.1.0"
    return reader, s, body


async def test_a_stream_that_was_cut_goes_on_behind_its_last_event(gateway, stages, key):
    reader, s, _ = await streaming(gateway, stages, key)
    reading = asyncio.create_task(reader.read("GET", f"/requests/{s.request_id}/events"))
    await stages.chunk(s, 2, "d")
    await stages.end_kept(s, 3)
    assert await reading == 200
    assert reader.data == [f'{{"text":"{c}"}}' for c in "abcd"] + ["[DONE]"]
    assert await reader.read("GET", f"/requests/{s.request_id}/events") == 204


async def test_a_stream_that_has_ended_goes_on_at_another_gateway(
    gateway, stages, start_gateway, broker_settings, key
):
    reader, s, body = await streaming(gateway, stages, key)
    await stages.chunk(s, 2, "d")
    await stages.end_kept(s, 3)
    async with start_gateway(broker_settings) as other:
        await other.until_ready(stages.model)
        reader._gateway = other
        assert await reader.read("GET", f"/requests/{s.request_id}/events") == 200
        assert reader.data == [f'{{"text":"{c}"}}' for c in "abcd"] + ["[DONE]"]
        whole = Reader(other)
        assert await whole.read("POST", "/v1/chat/completions", json=body, headers=key) == 200
        assert whole.data == reader.data


async def test_a_stream_with_a_key_is_joined_while_it_runs(gateway, stages, key):
    _, s, body = await streaming(gateway, stages, key)
    joined = Reader(gateway)
    reading = asyncio.create_task(
        joined.read("POST", "/v1/chat/completions", json=body, headers=key)
    )
    await stages.chunk(s, 2, "d")
    await stages.end_kept(s, 3)
    assert await reading == 200
    assert joined.data == [f'{{"text":"{c}"}}' for c in "abcd"] + ["[DONE]"]


async def test_a_stream_of_which_the_middle_is_gone_says_so(gateway, stages, key, monkeypatch):
    reader, s, body = await streaming(gateway, stages, key)
    await stages.chunk(s, 2, "d")
    await stages.end_kept(s, 3)
    replay = type(stages.broker).replay

    async def aged(broker: Any, subject: str, **more: Any) -> Any:
        return (await replay(broker, subject, **more))[2:]

    monkeypatch.setattr(type(stages.broker), "replay", aged)
    assert await reader.read("GET", f"/requests/{s.request_id}/events") == 410
    answer = await gateway.client.post("/v1/chat/completions", json=body, headers=key)
    assert answer.status_code == 410
    assert "15 minutes" in answer.json()["error"]["message"]


async def test_a_stream_does_not_go_on_with_another_owners_text(gateway, stages, key):
    """What the client has got was void: what came in its place may not follow it."""
    reader, s, _ = await streaming(gateway, stages, key)
    of_next = {"request_id": s.request_id, "epoch": 2, "seq": 1}
    takeover = Takeover(tenant=s.tenant, decode_instance="decode-2", **of_next)
    await stages._out(s, takeover, "takeover")
    await stages._out(s, Chunk(chunks=(b'{"text":"x"}', b'{"text":"y"}'), **of_next), "c1.2")
    await stages.end_kept(s, 2, epoch=2)
    assert await reader.read("GET", f"/requests/{s.request_id}/events") == 500
    assert reader.data == [f'{{"text":"{c}"}}' for c in "ab"]


async def test_events_of_nothing_and_ids_of_nothing_are_refused(gateway, stages, key):
    for request_id in ("nothing", "resp_nothing", "ik_nothing", "ik_", "a.b"):
        answer = await gateway.client.get(f"/requests/{request_id}/events")
        assert answer.status_code == 404, request_id
    _, s, _ = await streaming(gateway, stages, key)
    answer = await gateway.client.get(
        f"/requests/{s.request_id}/events", headers={"Last-Event-ID": "five"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    await stages.end_kept(s, 2)
    answer = await gateway.client.get(
        f"/requests/{s.request_id}/events", headers={"Last-Event-ID": "1.2.0"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert "up to 1" in answer.json()["error"]["message"]
