"""Webhook endpoints over HTTP, as OpenAI's SDK asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from standardwebhooks import Webhook

from headrace.gateway.pace import Pace
from headrace.shared.settings import WebhookSettings

from ..gateway.conftest import connected, running_gateway
from .conftest import Receiver, Stage


@pytest.fixture
async def url(stage: Stage, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A gateway whose tenant is the stage's; with the parameter `False` it allows public addresses alone."""
    webhooks = WebhookSettings(allow_private=getattr(request, "param", True))
    async with running_gateway(
        stage.settings.broker, Pace(), webhooks=webhooks, tenant=stage.tenant
    ) as gateway:
        await connected(gateway.client)
        yield gateway.url


async def test_the_sdk_makes_changes_lists_tries_and_deletes_an_endpoint(
    url: str, stage: Stage, receiver: Receiver
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        hooks = client.webhooks
        made = await hooks.create(url=receiver.url, event_types=["batch.completed"], name="ours")
        other = await hooks.create(url=receiver.url, event_types=["batch.failed"], name="other")
        assert [e.id async for e in hooks.list(limit=1)] == [other.id, made.id]
        assert "response.incomplete" in (await hooks.event_types.list()).data
        twice = ["batch.completed", "batch.expired", "batch.completed"]
        changed = await hooks.update(made.id, event_types=twice)
        assert changed.event_types == ["batch.completed", "batch.expired"]
        found = await hooks.retrieve(made.id)
        assert (found.name, found.url) == ("ours", receiver.url)
        assert made.signing_secret not in found.model_dump_json()
        result = await hooks.test(made.id, event_type="batch.completed")
        assert result.status_code == 200
        Webhook(made.signing_secret).verify(receiver.requests[0].body, receiver.requests[0].headers)
        assert (await hooks.delete(other.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await hooks.retrieve(other.id)


async def test_after_a_change_of_secret_the_old_one_signs_for_a_day_or_not_at_all(
    url: str, stage: Stage, receiver: Receiver
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        first = await client.webhooks.create(
            url=receiver.url, event_types=["batch.completed"], name=""
        )
        second = await client.webhooks.rotate_secret(
            first.id, keep_old_secret_active_for_24_hours=True
        )
        await client.webhooks.test(first.id, event_type="batch.completed")
        third = await client.webhooks.rotate_secret(first.id)
        await client.webhooks.test(first.id, event_type="batch.completed")
    kept, last = receiver.requests
    for secret in (first.signing_secret, second.signing_secret):
        Webhook(secret).verify(kept.body, kept.headers)
    Webhook(third.signing_secret).verify(last.body, last.headers)
    assert len(last.headers["webhook-signature"].split()) == 1


async def test_what_was_sent_to_an_endpoint_is_listed_with_every_try(
    url: str, stage: Stage, receiver: Receiver
) -> None:
    receiver.statuses = [500, 200]
    endpoint = await stage.endpoint(receiver.url)
    stage.start()
    await stage.tell("batch_1")
    (sending,) = await stage.noted("delivered")
    async with httpx.AsyncClient(base_url=url) as client:
        found = (await client.get(f"/v1/webhook_endpoints/{endpoint.id}/deliveries")).json()
    (shown,) = found["data"]
    assert (shown["id"], shown["state"], shown["subject"]) == (sending.id, "delivered", "batch_1")
    assert [attempt["status_code"] for attempt in shown["attempts"]] == [500, 200]


@pytest.mark.parametrize("url", [False], indirect=True)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"url": "https://10.0.0.1/x"}, "no public address"),
        ({"url": "https://[::ffff:127.0.0.1]/x"}, "no public address"),
        ({"url": "http://example.com/x"}, "url must be https://"),
        ({"url": "https://a:b@example.com/x"}, "without user and password"),
        ({"url": "https://example.com/x", "event_types": ["batch.gone"]}, "event_types must be of"),
        ({"url": "https://example.com/x", "event_types": []}, "event_types must be of"),
        ({"url": None}, "url is missing"),
        ({"url": 7}, "the body is not what it should be"),
    ],
)
async def test_what_an_endpoint_can_not_be_is_refused_by_name(
    url: str, body: dict[str, object], words: str
) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(
            "/v1/webhook_endpoints", json={"event_types": ["batch.completed"]} | body
        )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
