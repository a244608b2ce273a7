"""Many bodies, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from headrace.client import Client, Result
from headrace.shared.errors import QueueFullError

from ..pipeline.conftest import STAGES
from .conftest import Engines, Pipeline, completion, expected_text


async def test_two_hundred_bodies_have_their_results_and_a_bad_one_is_one_error(
    pipeline: Pipeline, client: Client, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    num_read = num_yielded = furthest = 0

    async def bodies() -> AsyncIterator[dict[str, Any]]:
        nonlocal num_read, furthest
        for number in range(200):
            num_read += 1
            furthest = max(furthest, num_read - num_yielded)
            bad = {"temperature": -1} if number == 77 else {}
            yield completion(pipeline, f"body {number}", **bad)

    results: dict[int, Result] = {}
    async for index, result in client.map(bodies(), endpoint="completions"):
        num_yielded += 1
        assert index not in results
        results[index] = result
    assert sorted(results) == list(range(200))
    bad = results.pop(77)
    assert (bad.status, bad.http_status) == ("error", 400)
    for index, result in results.items():
        assert result.json()["choices"][0]["text"] == expected_text(f"body {index}", 16)
    assert engines[0].max_running <= 16
    assert furthest <= 16


async def test_results_come_in_order_when_they_are_asked_to(
    pipeline: Pipeline, client: Client
) -> None:
    await pipeline.start(*STAGES)
    lengths = [400, 1, 1, 200, 1, 1, 1, 1, 50, 1]
    bodies = (
        completion(pipeline, f"n {n}", max_tokens=length, ignore_eos=True)
        for n, length in enumerate(lengths)
    )
    got = [
        (index, result.timings.num_output_token_ids)
        async for index, result in client.map(
            bodies, endpoint="completions", concurrency=3, ordered=True
        )
    ]
    assert got == list(enumerate(lengths))


async def test_a_body_that_can_not_be_published_is_one_error(
    pipeline: Pipeline, client: Client
) -> None:
    await pipeline.start(*STAGES)
    bodies: list[Any] = [
        b"no JSON",
        {"prompt": "no model"},
        completion(pipeline, "good"),
        {"x": {1}},
    ]
    results = dict([pair async for pair in client.map(bodies, endpoint="completions")])
    assert [results[i].http_status for i in range(4)] == [400, 400, 200, 400]
    assert "`model`" in (results[1].error or "")


async def test_leaving_a_map_cancels_what_is_under_way(
    pipeline: Pipeline, client: Client, engines: Engines
) -> None:
    engines.hold = True
    await pipeline.start(*STAGES)
    bodies = (completion(pipeline, f"held {n}") for n in range(100))
    async with aclosing(client.map(bodies, endpoint="completions", concurrency=4)) as results:
        first = asyncio.ensure_future(anext(results))
        await engines[0].until_running(4)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await engines[0].until_running(0)
    assert engines[0].max_running == 4


async def test_an_error_of_the_source_ends_the_map_and_cancels_what_is_under_way(
    pipeline: Pipeline, client: Client, engines: Engines
) -> None:
    engines.hold = True
    await pipeline.start(*STAGES)

    async def bodies() -> AsyncIterator[dict[str, Any]]:
        yield completion(pipeline, "held")
        await engines[0].until_running(1)
        raise ValueError("line 2")

    with pytest.raises(ValueError, match="line 2"):
        _ = [pair async for pair in client.map(bodies(), endpoint="completions")]
    await engines[0].until_running(0)


async def test_a_full_queue_is_waited_for(
    pipeline: Pipeline, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = client._connected
    publish, refused = broker.publish_durable, []

    async def full_once(subject: str, payload: bytes, **more: Any) -> bool:
        if not refused:
            refused.append(subject)
            raise QueueFullError("full", retry_after_s=0.0)
        return await publish(subject, payload, **more)

    monkeypatch.setattr(broker, "publish_durable", full_once)
    await pipeline.start(*STAGES)
    bodies = [completion(pipeline, "patience")]
    ((_, result),) = [pair async for pair in client.map(bodies, endpoint="completions")]
    assert (result.status, len(refused)) == ("ok", 1)


async def test_what_nobody_takes_expires(pipeline: Pipeline, client: Client) -> None:
    results = client.map([completion(pipeline, "x")], endpoint="completions", deadline_s=-4.9)
    ((_, result),) = [pair async for pair in results]
    assert (result.status, result.http_status) == ("expired", 504)


async def test_one_at_a_time_is_the_least(client: Client) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        await anext(client.map([], concurrency=0))
