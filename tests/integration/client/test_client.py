"""Submit, walk away, come back: on a real broker, with the whole pipeline behind it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from headrace.client import Client, NoResultError, Result
from headrace.render.renderer import Rendered
from headrace.render.renderer_fake import FakeRenderer
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import BadRequestError, BrokerError
from headrace.shared.messages import Terminal
from headrace.shared.subjects import Lane, Role

from ..pipeline.conftest import STAGES
from .conftest import Engines, Pipeline, completion, expected_text, submit, with_decode

COME_BACK = """
import sys
from headrace.client.sync import Client
with Client(sys.argv[1]) as client:
    print(client.result(sys.argv[2], 60).json()["choices"][0]["text"], end="")
"""


def text_of(result: Result) -> Any:
    return result.json()["choices"][0]["text"]


@pytest.mark.parametrize("lane", ["rt", "std", "bulk"])
async def test_what_is_submitted_has_its_result(
    pipeline: Pipeline, client: Client, lane: Any
) -> None:
    await pipeline.start(*STAGES)
    request_id = await submit(client, completion(pipeline, "hello"), lane=lane)
    result = await client.result(request_id, 60)
    assert (result.status, result.http_status, result.error) == ("ok", 200, None)
    assert text_of(result) == expected_text("hello", 16)
    assert set(result.timings.workers) >= {"render", "decode", "derender"}
    assert await client.result(request_id, 60) == result


async def test_a_result_is_there_for_a_process_that_comes_later(pipeline: Pipeline) -> None:
    async with Client(pipeline.settings.broker) as first:
        request_id = await submit(first, completion(pipeline, "walk away"))
    await pipeline.start(*STAGES)
    later = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COME_BACK,
        pipeline.settings.broker.url,
        request_id,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await later.communicate()
    assert out.decode() == expected_text("walk away", 16)


async def test_two_clients_get_the_same_result(pipeline: Pipeline, client: Client) -> None:
    request_id = await submit(client, completion(pipeline, "shared"))
    async with Client(pipeline.settings.broker) as other:
        both = asyncio.gather(client.result(request_id, 60), other.result(request_id, 60))
        await pipeline.start(*STAGES)
        first, second = await both
    assert first == second


async def test_a_refused_body_is_a_result(pipeline: Pipeline, client: Client) -> None:
    await pipeline.start(Role.RENDER)
    result = await client.result(
        await submit(client, completion(pipeline, "x", temperature=-1)), 60
    )
    assert (result.status, result.http_status) == ("error", 400)
    assert result.error is not None
    assert "temperature" in result.error


async def test_a_request_without_a_worker_ends_with_its_deadline_once_it_is_taken(
    pipeline: Pipeline, client: Client
) -> None:
    request_id = await submit(client, completion(pipeline, "late"), deadline_s=0.0)
    await pipeline.start(Role.RENDER)
    assert (await client.result(request_id, 60)).status == "expired"


async def test_an_id_that_was_never_submitted_has_no_result(client: Client) -> None:
    with pytest.raises(NoResultError, match=r"request nobody: nothing came within 0\.01 s"):
        await client.result("nobody", 0.01)


async def test_a_body_is_checked_before_it_is_published(client: Client) -> None:
    with pytest.raises(BadRequestError, match="`model`"):
        await client.submit({"messages": []})
    with pytest.raises(BadRequestError, match="request_id"):
        await client.submit({"model": "m"}, request_id="a.b")
    with pytest.raises(BadRequestError, match=r"Hr-Reply-To must be hr\.v1\.reply\.default\.TOKEN"):
        await client.submit({"model": "m"}, reply_to="hr.v1.reply.other.x")


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that render has worked on."""
    found: list[bytes] = []
    render = FakeRenderer.render

    async def noted(self: FakeRenderer, endpoint: Any, body: bytes, *args: Any) -> Rendered:
        found.append(body)
        return await render(self, endpoint, body, *args)

    monkeypatch.setattr(FakeRenderer, "render", noted)
    return found


async def test_the_same_id_again_is_the_same_request(
    pipeline: Pipeline, client: Client, rendered: list[bytes]
) -> None:
    for _ in range(3):
        assert await submit(client, completion(pipeline, "once"), request_id="mine") == "mine"
    await pipeline.start(*STAGES)
    await client.result("mine", 60)
    await client.result(await submit(client, completion(pipeline, "the last one")), 60)
    assert len(rendered) == 2


async def test_an_id_whose_result_is_stored_is_not_computed_again(
    pipeline: Pipeline, client: Client, rendered: list[bytes]
) -> None:
    await pipeline.start(*STAGES)
    heard: asyncio.Queue[Received] = asyncio.Queue()
    reply = subjects.reply("default", "again")
    await pipeline.broker.subscribe(reply, heard.put_nowait)
    body = completion(pipeline, "once and for all")
    first = await client.result(await submit(client, body, request_id="done"), 60)
    # Past the 2 minutes in which the broker knows its message ID:
    headers = {"Hr-Request-Id": "done", "Hr-Endpoint": "completions", "Hr-Reply-To": reply}
    subject = subjects.req("default", pipeline.settings.model.served_name, Lane.STD)
    await pipeline.broker.publish_durable(
        subject, b'{"model": "another body"}', message_id="another", headers=headers
    )
    terminal = wire.decode((await asyncio.wait_for(heard.get(), 60)).payload, Terminal)
    assert Result.of_terminal(terminal) == first
    assert len(rendered) == 1


@pytest.mark.parametrize("lane", ["rt", "std"])
async def test_the_end_is_published_where_the_submission_says(
    pipeline: Pipeline, client: Client, lane: Any
) -> None:
    await pipeline.start(*STAGES)
    heard: asyncio.Queue[Received] = asyncio.Queue()
    reply = subjects.reply("default", "invoices-7")
    await pipeline.broker.subscribe(reply, heard.put_nowait)
    good = await submit(client, completion(pipeline, "reply"), lane=lane, reply_to=reply)
    told = wire.decode((await asyncio.wait_for(heard.get(), 60)).payload, Terminal)
    assert told.request_id == good
    assert Result.of_terminal(told) == await client.result(good, 60)
    bad = await submit(client, completion(pipeline, "x", n=0), lane=lane, reply_to=reply)
    told = wire.decode((await asyncio.wait_for(heard.get(), 60)).payload, Terminal)
    assert (told.request_id, told.http_status) == (bad, 400)


async def test_a_reply_subject_of_another_tenant_is_refused(
    pipeline: Pipeline, client: Client
) -> None:
    await pipeline.start(Role.RENDER)
    heard: list[Received] = []
    foreign = subjects.reply("other", "x")
    await pipeline.broker.subscribe(foreign, heard.append)
    await pipeline.broker.publish_durable(
        subjects.req("default", pipeline.settings.model.served_name, Lane.STD),
        b"{}",
        message_id="r1",
        headers={"Hr-Reply-To": foreign},
    )
    result = await client.result("r1", 60)
    assert (result.http_status, heard) == (400, [])


async def test_a_body_and_a_result_larger_than_a_message_arrive_whole(
    pipeline: Pipeline, client: Client
) -> None:
    await pipeline.start(*STAGES)
    large = completion(pipeline, "large", user="x" * 9_000_000)
    result = await client.result(await submit(client, large), 60)
    assert text_of(result) == expected_text("large", 16)
    body = b'{"pad": "%s"}' % (b"y" * 9_000_000)
    terminal = Terminal(request_id="big", seq=0, status="ok", http_status=200, body=body)
    await pipeline.broker.publish_durable(
        subjects.res("default", "big"), wire.encode(terminal), message_id="big"
    )
    assert (await client.result("big", 60)).body == body


async def test_a_waiting_request_and_a_running_one_are_cancelled(
    pipeline: Pipeline, client: Client, engines: Engines
) -> None:
    pipeline.settings = with_decode(pipeline, slots=1)
    engines.hold = True
    await pipeline.start(*STAGES)
    running = await submit(client, completion(pipeline, "running"))
    await engines[0].until_running(1)
    waiting = await submit(client, completion(pipeline, "waiting"))
    await client.cancel(waiting, "not needed")
    await client.cancel(running)
    result = await client.result(running, 60)
    assert (result.status, result.error) == (
        "cancelled",
        f"request {running} was cancelled: cancelled by its caller",
    )
    result = await client.result(waiting, 60)
    assert (result.status, result.http_status) == ("cancelled", 499)
    await engines[0].until_running(0)


async def test_a_client_that_is_not_connected_says_so() -> None:
    with pytest.raises(BrokerError, match="not connected"):
        await Client().result("r1")


async def test_no_broker_is_an_error_in_time() -> None:
    with pytest.raises(BrokerError, match=r"no broker within 0\.2 s"):
        await Client("nats://127.0.0.1:1", connect_timeout_s=0.2).connect()
