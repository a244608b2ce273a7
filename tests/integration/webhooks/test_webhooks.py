"""Webhooks reach their receiver, once by ID, signed, however often it fails; and reach nobody else."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import openai
import pytest
from standardwebhooks import Webhook

from headrace.batch.webhook_delivery import MAX_PER_ENDPOINT, RETRY_DELAYS_S
from headrace.shared import subjects
from headrace.shared.events import event
from headrace.shared.nats_server import NatsServer
from headrace.shared.webhooks import addresses
from headrace.shared.webhooks import sender as sender_module
from headrace.shared.webhooks.endpoints import Endpoint, new_secret, webhook_id_of
from headrace.shared.webhooks.sender import MAX_ERROR_CHARS

from .conftest import WATCHDOG_S, Receiver, Stage


async def test_a_receiver_that_fails_twice_gets_each_event_once_by_id_and_well_signed(
    stage: Stage, receiver: Receiver
) -> None:
    endpoint = await stage.endpoint(receiver.url)
    receiver.statuses = [500, 503, 204]
    stage.start()
    await stage.tell("batch_1")
    (sending,) = await stage.noted("delivered")
    assert [attempt.status_code for attempt in sending.attempts] == [500, 503, 204]
    await stage.tell("batch_2")
    await stage.noted("delivered", 2)
    assert len(receiver.requests) == 4
    ids = [request.headers["webhook-id"] for request in receiver.requests]
    assert ids[0] == ids[1] == ids[2] == sending.id != ids[3]
    for request in receiver.requests:
        body = Webhook(endpoint.secret).verify(request.body, request.headers)
        assert body["type"] == "batch.completed"
    client = openai.OpenAI(api_key="none", webhook_secret=endpoint.secret)
    found = client.webhooks.unwrap(receiver.requests[3].body, receiver.requests[3].headers)
    assert (found.type, found.id, found.data.id) == ("batch.completed", ids[3], "batch_2")


async def test_little_is_noted_of_what_a_receiver_says_that_speaks_no_http(
    stage: Stage, receiver: Receiver
) -> None:
    receiver.words = b"X" * 50_000 + b"\r\n\r\n"
    await stage.endpoint(receiver.url)
    stage.start()
    await stage.tell("batch_1")
    (sending,) = await stage.noted("failed")
    for attempt in sending.attempts:
        assert attempt.error is not None
        assert attempt.error.startswith("RemoteProtocolError")
        assert len(attempt.error) <= MAX_ERROR_CHARS


async def test_an_event_that_is_told_again_is_not_sent_again(
    stage: Stage, receiver: Receiver
) -> None:
    endpoint = await stage.endpoint(receiver.url)
    stage.start()
    await stage.tell("batch_1")
    await stage.noted("delivered")
    # As after the two minutes for which the broker knows an ID: only the record tells.
    again = event(stage.tenant, "batch", "completed", "batch_1", {}, at=time.time())
    for number in range(2):
        await stage.broker.publish_durable(
            subjects.hook(stage.tenant, endpoint.id),
            msgspec.json.encode(again),
            message_id=f"{stage.tenant}{number}",
        )
    await stage.tell("batch_2")
    await stage.noted("delivered", 2)
    await stage.settled()
    ids = [request.headers["webhook-id"] for request in receiver.requests]
    assert ids.count(webhook_id_of(again)) == 1


async def test_after_the_last_try_a_webhook_is_given_up_and_says_why(
    stage: Stage, receiver: Receiver
) -> None:
    await stage.endpoint(receiver.url)
    receiver.statuses = [500]
    stage.start(delays_s=(0.01,))
    await stage.tell("batch_1")
    (sending,) = await stage.noted("failed")
    assert [attempt.status_code for attempt in sending.attempts] == [500, 500]
    assert sending.next_attempt_at is None


async def test_a_redirect_is_not_followed(stage: Stage, receiver: Receiver) -> None:
    await stage.endpoint(receiver.url)
    receiver.statuses, receiver.headers = [302], f"location: {receiver.url}-other\r\n"
    stage.start(delays_s=())
    await stage.tell("batch_1")
    (sending,) = await stage.noted("failed")
    assert [request.path for request in receiver.requests] == ["/hook"]
    assert sending.attempts[0].status_code == 302


async def test_nothing_is_sent_to_a_private_address_whatever_name_it_hides_behind(
    stage: Stage, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "check_url", lambda url, **_: ("localhost", 80))
    await stage.endpoint(receiver.url.replace("127.0.0.1", "localhost"))
    stage.start(delays_s=(), allow_private=False)
    await stage.tell("batch_1")
    (sending,) = await stage.noted("failed")
    assert "no public address" in (sending.attempts[0].error or "")
    assert receiver.requests == []


async def test_a_request_goes_where_the_name_was_checked_to_be_and_nowhere_else(
    stage: Stage, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(receiver.url.rpartition(":")[2].partition("/")[0])

    async def checked(url: str, *, allow_private: bool) -> addresses.Target:
        return addresses.Target("receiver.invalid", port, "127.0.0.1")

    monkeypatch.setattr(sender_module, "resolve", checked)
    await stage.endpoint(f"http://receiver.invalid:{port}/hook")  # a name that nobody resolves
    stage.start(delays_s=())
    await stage.tell("batch_1")
    await stage.noted("delivered")
    assert receiver.requests[0].headers["host"] == f"receiver.invalid:{port}"


async def test_a_receiver_that_is_gone_for_good_is_asked_no_more(
    stage: Stage, receiver: Receiver
) -> None:
    endpoint = await stage.endpoint(receiver.url)
    receiver.statuses = [410]
    stage.start()
    await stage.tell("batch_1")
    await stage.noted("failed")
    other = await stage.endpoint(receiver.url, "batch.failed")
    receiver.statuses = [200]
    await stage.tell("batch_2")
    await stage.tell("batch_3", "failed")
    await stage.noted("delivered")
    assert len(receiver.requests) == 2
    found = await stage.records.get("hook", stage.tenant, endpoint.id, Endpoint)
    assert found is not None
    assert found[0].disabled == "the receiver answered 410"
    assert other.disabled is None


async def test_an_endpoint_hears_only_of_what_it_asked_for_and_of_its_own_tenant(
    stage: Stage, receiver: Receiver
) -> None:
    await stage.endpoint(receiver.url, "batch.failed")
    await stage.endpoint(receiver.url, "batch.completed", created_at=int(time.time()) + 3600)
    stage.start()
    await stage.tell("batch_1")
    stage.tenant += "-other"
    await stage.tell("batch_2", "failed")
    stage.tenant = stage.tenant.removesuffix("-other")
    await stage.tell("batch_3", "failed")
    await stage.noted("delivered")
    assert [json.loads(r.body)["data"]["id"] for r in receiver.requests] == ["batch_3"]


async def test_a_receiver_that_hangs_leaves_the_others_alone(
    stage: Stage, receiver: Receiver
) -> None:
    hung, enough = asyncio.Event(), asyncio.Event()
    num_hung = 0

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_hung
        num_hung += 1
        if num_hung == MAX_PER_ENDPOINT:
            enough.set()
        await hung.wait()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    await stage.endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook")
    await stage.endpoint(receiver.url, "batch.failed")
    stage.start(slots=MAX_PER_ENDPOINT + 1, timeout_s=300.0)
    for number in range(2 * MAX_PER_ENDPOINT):
        await stage.tell(f"batch_{number}")
    async with asyncio.timeout(WATCHDOG_S):
        await enough.wait()
    await stage.tell("batch_x", "failed")
    await stage.noted("delivered")
    assert num_hung == MAX_PER_ENDPOINT
    hung.set()
    server.close()


async def test_while_a_secret_is_being_replaced_both_sign(stage: Stage, receiver: Receiver) -> None:
    old = new_secret()
    endpoint = await stage.endpoint(
        receiver.url, old_secret=old, old_secret_until=int(time.time()) + 3600
    )
    stage.start()
    await stage.tell("batch_1")
    await receiver.got(1)
    for secret in (old, endpoint.secret):
        Webhook(secret).verify(receiver.requests[0].body, receiver.requests[0].headers)


async def test_what_waits_for_its_next_try_outlives_the_broker_and_the_sender(
    own_server: NatsServer, own_stage: Stage, receiver: Receiver
) -> None:
    await own_stage.endpoint(receiver.url)
    receiver.statuses = [500, 200]
    sender = own_stage.start(delays_s=(1.0,))
    await own_stage.tell("batch_1")
    await own_stage.noted("pending")
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)
    await own_server.restart()
    own_stage.start(delays_s=(1.0,))
    (sending,) = await own_stage.noted("delivered")
    assert [attempt.status_code for attempt in sending.attempts] == [500, 200]
    assert len(receiver.requests) == 2
    assert RETRY_DELAYS_S[0] < 60 < sum(RETRY_DELAYS_S)
