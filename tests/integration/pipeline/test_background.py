"""The Responses API's background mode by OpenAI's own SDK: whole pipeline, real broker, fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from .conftest import STAGES, Engines, Pipeline

WATCHDOG_S = 60.0


@pytest.fixture
async def sdk(settings: Settings) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{settings.gateway.port}/v1",
        api_key="none",
        max_retries=0,
        timeout=WATCHDOG_S,
    ) as client:
        yield client


async def until(sdk: openai.AsyncOpenAI, response_id: str, *statuses: str) -> Any:
    """Poll as a client does, until the response has one of these statuses."""
    async with asyncio.timeout(WATCHDOG_S):
        while (response := await sdk.responses.retrieve(response_id)).status not in statuses:
            continue
    return response


async def test_a_background_response_is_queued_then_in_progress_then_completed(
    pipeline: Pipeline, held: Engines, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = settings.model.served_name
    response = await sdk.responses.create(
        model=model, input="hi", background=True, max_output_tokens=8, metadata={"a": "b"}
    )
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert response.metadata == {"a": "b"}
    running = await until(sdk, response.id, "in_progress")
    assert running.output == []
    for engine in held.decode:
        engine.release()
    done = await until(sdk, response.id, "completed", "incomplete")
    assert (done.id, done.background, done.created_at) == (response.id, True, response.created_at)
    assert done.output_text
    assert done.usage is not None
    assert done.usage.output_tokens == 8

    whole = await sdk.responses.create(model=model, input="hi", max_output_tokens=8)
    assert whole.output_text == done.output_text


async def test_a_background_response_is_answered_by_any_gateway_after_its_own_was_killed(
    pipeline: Pipeline, held: Engines, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    (gateway,) = await pipeline.start(Role.GATEWAY)
    await pipeline.start(*STAGES)
    response = await sdk.responses.create(
        model=settings.model.served_name, input="hi", background=True, max_output_tokens=8
    )
    await gateway.kill()
    for engine in held.decode:
        engine.release()
    await pipeline.start(Role.GATEWAY)
    done = await until(sdk, response.id, "completed", "incomplete", "failed")
    assert done.output_text


async def test_a_background_stream_goes_on_where_it_was_cut(
    pipeline: Pipeline, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    stream = await sdk.responses.create(
        model=settings.model.served_name,
        input="hi",
        background=True,
        stream=True,
        max_output_tokens=20,
    )
    first = []
    async for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    response_id = first[0].response.id
    assert [event.type for event in first[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    rest = [
        event
        async for event in await sdk.responses.retrieve(
            response_id, stream=True, starting_after=first[-1].sequence_number
        )
    ]
    events = first + rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert text == events[-1].response.output_text
    kept = await sdk.responses.retrieve(response_id)
    assert kept.output_text == text

    again = [event async for event in await sdk.responses.retrieve(response_id, stream=True)]
    assert [e.model_dump() for e in again] == [e.model_dump() for e in events]


async def test_a_stored_stream_has_nothing_behind_its_last_event(
    pipeline: Pipeline, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    stream = await sdk.responses.create(
        model=settings.model.served_name, input="hi", store=True, stream=True, max_output_tokens=4
    )
    last = [event async for event in stream][-1]
    assert last.type in ("response.completed", "response.incomplete")
    rest = await sdk.responses.retrieve(
        last.response.id, stream=True, starting_after=last.sequence_number
    )
    assert [event async for event in rest] == []


async def test_a_background_response_is_cancelled_and_stays_so(
    pipeline: Pipeline, held: Engines, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    for stream in (False, True):
        created = await sdk.responses.create(
            model=settings.model.served_name, input="hi", background=True, stream=stream
        )
        if stream:
            response_id = (await anext(aiter(created))).response.id
        else:
            response_id = created.id
        await until(sdk, response_id, "in_progress")
        cancelled = await sdk.responses.cancel(response_id)
        assert (cancelled.id, cancelled.status) == (response_id, "cancelled")
        assert (await sdk.responses.cancel(response_id)).status == "cancelled"
        assert (await sdk.responses.retrieve(response_id)).status == "cancelled"
        if stream:
            last = [event async for event in created][-1]
            assert (last.type, last.response.status) == ("response.failed", "cancelled")


async def test_what_can_not_be_rendered_fails_with_the_reason(
    pipeline: Pipeline, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    response = await sdk.responses.create(
        model=settings.model.served_name,
        input=[{"role": "nobody", "content": "x"}],
        background=True,
    )
    failed = await until(sdk, response.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "invalid_prompt"
    assert "nobody" in failed.error.message


async def test_a_stored_response_is_gone_on_from_listed_and_deleted(
    pipeline: Pipeline, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = settings.model.served_name
    first = await sdk.responses.create(model=model, input="one", store=True, max_output_tokens=8)
    assert (await sdk.responses.retrieve(first.id)).output_text == first.output_text
    second = await sdk.responses.create(
        model=model, input="two", previous_response_id=first.id, store=True, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    spelled = await sdk.responses.create(
        model=model,
        input=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "two"},
        ],
        max_output_tokens=8,
    )
    assert second.output_text == spelled.output_text
    assert second.usage is not None
    assert spelled.usage is not None
    assert second.usage.input_tokens == spelled.usage.input_tokens

    items = await sdk.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in items.data]  # type: ignore[union-attr]
    assert texts == ["one", first.output_text, "two"]

    streamed = await sdk.responses.create(
        model=model, input="three", previous_response_id=second.id, store=True, stream=True
    )
    events = [event async for event in streamed]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.previous_response_id == second.id
    kept = await sdk.responses.retrieve(events[0].response.id)
    assert kept.output_text == events[-1].response.output_text

    await sdk.responses.delete(first.id)
    for call in (sdk.responses.retrieve, sdk.responses.cancel, sdk.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
            await call(first.id)
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        await sdk.responses.create(model=model, input="x", previous_response_id=first.id)


async def test_what_asks_for_too_little_storage_is_refused(
    pipeline: Pipeline, sdk: openai.AsyncOpenAI, settings: Settings
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = settings.model.served_name
    with pytest.raises(openai.BadRequestError, match="store"):
        await sdk.responses.create(model=model, input="x", background=True, store=False)
    plain = await sdk.responses.create(model=model, input="x", max_output_tokens=4)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(plain.id)
    kept = await sdk.responses.create(model=model, input="x", store=True, max_output_tokens=4)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await sdk.responses.cancel(kept.id)
    with pytest.raises(openai.BadRequestError, match="stream=true"):
        await sdk.responses.retrieve(kept.id, stream=True)
