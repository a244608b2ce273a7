"""The gateway over real HTTP and a real broker."""

import asyncio
import json

import httpx
import pytest

from headrace.gateway.service import run
from headrace.shared import wire
from headrace.shared.answer import Answer
from headrace.shared.errors import SettingsError
from headrace.shared.messages import Chunk, Timings
from headrace.shared.settings import GatewaySettings, Settings
from headrace.shared.subjects import Role

FAILURE = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


async def events_of(response):
    return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]


async def test_a_streamed_answer_comes_through(gateway, stages):
    async def play():
        s = await stages.take()
        await stages.chunk(s, 0, "a", "b")
        await stages.chunk(s, 1, "c")
        await stages.end(s, 2, timings=Timings(prefill_mode="local"))
        return s

    playing = asyncio.create_task(play())
    async with gateway.stream(stages.model) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = await events_of(response)
    assert events == ['{"text":"a"}', '{"text":"b"}', '{"text":"c"}', "[DONE]"]
    s = await playing
    assert response.headers["x-request-id"] == s.request_id
    record = (await gateway.client.get(f"/requests/{s.request_id}")).json()
    assert (record["status"], record["timings"]["prefill_mode"]) == ("ok", "local")


async def test_a_whole_answer_comes_through(gateway, stages):
    answer = gateway.post(stages.model, messages=[{"role": "user", "content": "é"}])
    s = await stages.take()
    assert json.loads(s.body)["messages"][0]["content"] == "é"
    await stages.end(s, body=b'{"id":"x"}')
    response = await answer
    assert (response.status_code, response.json()) == (200, {"id": "x"})


async def test_a_large_body_and_a_large_answer_come_through(gateway, stages):
    answer = gateway.post(stages.model, large="x" * 6_000_000)
    s = await stages.take()
    assert len(s.body) > 6_000_000
    large = json.dumps({"id": "y" * 6_000_000}).encode()
    await stages.end(s, body=large)
    assert (await answer).content == large


async def test_errors_come_with_their_status_before_the_first_byte(gateway, stages):
    answer = gateway.post(stages.model, stream=True)
    s = await stages.take()
    await stages.end(s, status="error", http_status=400, body=FAILURE)
    response = await answer
    assert (response.status_code, response.content) == (400, FAILURE)


async def test_errors_after_the_first_byte_are_events(gateway, stages):
    answer = gateway.post(stages.model, stream=True)
    s = await stages.take()
    await stages.chunk(s, 0, "a")
    await stages.end(s, 0, status="error", http_status=400, body=FAILURE)
    response = await answer
    assert response.status_code == 200
    assert await events_of(response) == ['{"text":"a"}', FAILURE.decode(), "[DONE]"]


async def test_a_chunk_that_was_lost_is_read_from_what_was_captured(gateway, stages, monkeypatch):
    receive, lost = Answer.receive, []

    def lossy(answer, received):
        message = wire.decode(received.payload, Chunk) if b"chunk.v1" in received.payload else None
        if message is not None and message.seq == 1 and not lost:
            lost.append(message)
        else:
            receive(answer, received)

    monkeypatch.setattr(Answer, "receive", lossy)
    answer = gateway.post(stages.model, stream=True)
    s = await stages.take()
    for seq, text in enumerate("abc"):
        await stages.chunk(s, seq, text)
    await stages.end(s, 3)
    events = await events_of(await answer)
    assert events == ['{"text":"a"}', '{"text":"b"}', '{"text":"c"}', "[DONE]"]
    assert lost


async def test_a_client_that_leaves_before_the_first_byte_cancels(gateway, stages):
    for stream in (True, False):
        answer = gateway.post(stages.model, stream=stream)
        s = await stages.take()
        answer.cancel()
        cancel = await stages.cancel_of(s)
        assert (cancel.tenant, cancel.reason) == ("default", "the client disconnected")


async def test_a_client_that_leaves_in_the_middle_cancels_until_the_request_ends(gateway, stages):
    playing = asyncio.create_task(stages.take())
    answering = asyncio.create_task(leave_after_one_event(gateway, stages.model))
    s = await playing
    await stages.chunk(s, 0, "a")
    assert await answering == 'data: {"text":"a"}'
    await stages.cancel_of(s)
    await stages.cancel_of(s)  # once more: the first may not have been heard
    await stages.end(s, 1, status="cancelled", http_status=499)


async def leave_after_one_event(gateway, model):
    async with gateway.stream(model) as response:
        async for line in response.aiter_lines():
            return line


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_of_10_mb_is_a_413_that_names_the_limit(gateway, stages, chunked):
    async def parts():
        for _ in range(10):
            yield b"x" * 1_000_000

    content = parts() if chunked else b"x" * 10_000_000
    response = await gateway.client.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert "8,388,608 bytes" in response.json()["error"]["message"]
    assert (await gateway.client.get("/health")).status_code == 200


async def test_a_length_that_lies_does_not_hang_the_gateway(gateway):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{}"
    )
    writer.write_eof()
    await reader.read()
    writer.close()
    assert (await gateway.client.get("/health")).status_code == 200


async def test_a_model_that_nobody_serves_is_a_404(gateway):
    response = await gateway.post("nobody-serves-this")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


async def test_models_come_from_the_heartbeats(gateway, stages):
    models = (await gateway.client.get("/v1/models")).json()["data"]
    assert [m["max_model_len"] for m in models if m["id"] == stages.model] == [512]


async def test_a_request_id_is_answered_once(gateway, stages, start_gateway, broker_settings):
    answer = gateway.post(stages.model, headers={"X-Request-Id": stages.model})
    s = await stages.take()
    async with start_gateway(broker_settings) as other:
        await other.until_ready(stages.model)
        again = await other.post(stages.model, headers={"X-Request-Id": stages.model})
        assert again.status_code == 409  # the broker knows it
        await stages.end(s, body=b"{}")
        assert (await answer).status_code == 200
        again = await other.post(stages.model, headers={"X-Request-Id": stages.model})
        assert again.status_code == 409  # its answer is captured


async def test_a_request_that_nobody_takes_is_a_504_and_is_cancelled(gateway, stages):
    response = await gateway.post(stages.model, headers={"X-Request-Timeout": "0.05"})
    assert response.status_code == 504
    await stages.cancel_of(await stages.take())


async def test_a_full_queue_is_a_429(own_gateway, own_stages):
    waiting = own_gateway.post(own_stages.model)
    refused = await own_gateway.post(own_stages.model)
    if refused.status_code != 429:  # the two may have overtaken one another
        waiting, refused = refused, await waiting
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    s = await own_stages.take()
    await own_stages.end(s, body=b"{}")
    if isinstance(waiting, asyncio.Task):
        assert (await waiting).status_code == 200


async def test_an_answer_goes_on_after_a_broker_crash(own_gateway, own_stages, own_server):
    answer = own_gateway.post(own_stages.model, stream=True)
    s = await own_stages.take()
    await own_stages.chunk(s, 0, "a")
    back = asyncio.Event()

    async def is_back():
        back.set()

    own_stages.broker.on_reconnect(is_back)
    own_server.kill()
    await own_server.start()
    await back.wait()
    await own_stages.chunk(s, 1, "b")
    await own_stages.end(s, 2)
    assert await events_of(await answer) == ['{"text":"a"}', '{"text":"b"}', "[DONE]"]


async def test_without_a_broker_requests_are_503_and_the_gateway_lives(
    own_gateway, own_stages, own_server
):
    own_server.kill()
    async with asyncio.timeout(30):
        while (await own_gateway.client.get("/ready")).status_code != 503:
            continue
    response = await own_gateway.post(own_stages.model)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (await own_gateway.client.get("/health")).status_code == 200


async def test_a_gateway_whose_broker_is_not_there_yet_is_alive_and_stops(
    own_server, start_gateway, broker_settings
):
    own_server.kill()
    url = type(broker_settings)(url=own_server.url)
    async with start_gateway(url) as gateway:
        assert (await gateway.client.get("/health")).status_code == 200
        assert (await gateway.client.get("/ready")).status_code == 503
        assert (await gateway.post("m")).status_code == 503


async def test_the_gateway_is_seen_and_says_good_bye(
    broker, table, stages, start_gateway, broker_settings
):
    async with asyncio.timeout(30):
        async with start_gateway(broker_settings):
            await table.wait_for(lambda t: t.ready(Role.GATEWAY))
        await table.wait_for(lambda t: not t.ready(Role.GATEWAY))


async def test_stop_lets_a_running_stream_end_and_refuses_new_requests(gateway, stages):
    answer = gateway.post(stages.model, stream=True)
    s = await stages.take()
    await stages.chunk(s, 0, "a")
    gateway.stop.set()
    async with asyncio.timeout(30):
        while (await gateway.client.get("/ready")).json()["status"] != "draining":
            continue
    refused = await gateway.post(stages.model)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.headers["connection"] == "close"
    await stages.end(s, 1)
    assert await events_of(await answer) == ['{"text":"a"}', "[DONE]"]
    await gateway.task


async def test_stop_ends_and_cancels_what_takes_too_long(stages, start_gateway, broker_settings):
    async with start_gateway(broker_settings, drain_timeout_s=0.01) as gateway:
        await gateway.until_ready(stages.model)
        answer = gateway.post(stages.model)
        s = await stages.take()
        gateway.stop.set()
        assert (await answer).status_code == 503
        await stages.cancel_of(s)


async def test_an_address_in_use_stops_the_start_and_is_named(gateway, broker_settings):
    edge = GatewaySettings(port=gateway.port)
    with pytest.raises(SettingsError, match=rf"gateway\.port {gateway.port}"):
        await run(
            Settings(broker=broker_settings, gateway=edge), engine="fake", stop=asyncio.Event()
        )


async def head(gateway, data):
    """Send bytes to the gateway's port as they are, and return all that comes back."""
    reader, writer = await asyncio.open_connection(
        gateway.client.base_url.host, gateway.client.base_url.port
    )
    try:
        for start in range(0, len(data), 2**14):
            writer.write(data[start : start + 2**14])
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 2**22,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 2**19,
        b"GET /" + b"y" * 2**22,
    ],
    ids=["one header", "many headers", "path"],
)
async def test_a_head_beyond_all_measure_is_cut_off_and_others_are_served(gateway, stages, data):
    answer = await head(gateway, data)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert (await gateway.client.get("/health")).status_code == 200


async def test_a_client_that_never_finishes_its_head_is_hung_up_on(gateway, stages, monkeypatch):
    monkeypatch.setattr("headrace.gateway.http_limits.HEAD_TIMEOUT_S", 0.05)
    answer = await head(gateway, b"GET /health HT")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.05 s" in answer
    assert await head(gateway, b"") == b""


async def test_a_head_over_the_limit_is_told_the_limit(gateway, stages):
    answer = await head(gateway, b"GET /health HTTP/1.1\r\nx: " + b"y" * 2**16)
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 431 ")
    assert "65,536 bytes" in json.loads(body)["error"]["message"]


async def test_one_connection_too_many_is_told_the_limit(start_gateway, broker_settings):
    async with start_gateway(broker_settings, max_connections=2) as gateway:
        held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
        for reader, writer in held:  # the gateway has both when it has answered on both
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        answer = await head(gateway, b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert b"gateway.max_connections" in answer
        for reader, writer in held:
            writer.close()
            await reader.read()
        while (await head_of_health(gateway)) != 200:
            continue  # until the gateway has seen that the two are gone


async def test_an_idle_connection_is_closed_after_the_setting(start_gateway, broker_settings):
    async with start_gateway(broker_settings, keep_alive_s=1) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            answer = await reader.read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in answer.lower()
        writer.close()


def test_an_idle_connection_outlives_the_minute_that_load_balancers_wait():
    assert GatewaySettings().keep_alive_s > 60


async def head_of_health(gateway):
    try:
        return (await gateway.client.get("/health")).status_code
    except httpx.TransportError:
        return 0
