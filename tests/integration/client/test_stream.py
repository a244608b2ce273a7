"""A streamed answer: each part once, in order, from wherever one wants to go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.client import Client, Part, Result
from headrace.shared import subjects, wire
from headrace.shared.errors import AnswerLostError, BadRequestError
from headrace.shared.messages import Chunk, Takeover, Terminal

from ..pipeline.conftest import STAGES
from .conftest import Engines, Pipeline, completion, expected_text, submit

LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


def text_of(parts: list[Part]) -> str:
    return "".join(
        choice["text"] for part in parts for chunk in part.json() for choice in chunk["choices"]
    )


async def read(client: Client, request_id: str, from_seq: int = 0) -> tuple[list[Part], Result]:
    *parts, result = [part async for part in client.stream(request_id, from_seq)]
    assert all(isinstance(part, Part) for part in parts)
    assert isinstance(result, Result)
    return [part for part in parts if isinstance(part, Part)], result


@pytest.mark.parametrize("lane", ["rt", "std"])
async def test_an_answer_is_streamed_whole(pipeline: Pipeline, client: Client, lane: Any) -> None:
    await pipeline.start(*STAGES)
    request_id = await submit(client, completion(pipeline, "stream it", **LONG), lane=lane)
    parts, result = await read(client, request_id)
    assert [part.seq for part in parts] == list(range(len(parts)))
    assert text_of(parts) == expected_text("stream it", 400, ignore_eos=True)
    assert (result.status, result.body) == ("ok", b"")
    assert await client.result(request_id, 60) == result


async def test_a_reader_goes_on_in_the_middle_with_another_client(
    pipeline: Pipeline, client: Client, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    request_id = await submit(client, completion(pipeline, "go on", **LONG))
    first: list[Part] = []
    stream = client.stream(request_id)
    async for part in stream:
        assert isinstance(part, Part)
        first.append(part)
        if len(first) == 3:
            break
    await stream.aclose()
    async with Client(pipeline.settings.broker) as other:
        rest, result = await read(other, request_id, first[-1].seq + 1)
        assert rest[0].seq == 3
        assert text_of([*first, *rest]) == expected_text("go on", 400, ignore_eos=True)
        nothing, again = await read(other, request_id, rest[-1].seq + 1)
    assert (nothing, again) == ([], result)


async def test_parts_that_are_gone_are_an_error_and_not_a_hole(
    pipeline: Pipeline, client: Client
) -> None:
    terminal = Terminal(request_id="old", seq=7, status="ok", http_status=200, epoch=1)
    await pipeline.broker.publish_durable(
        subjects.res("default", "old"), wire.encode(terminal), message_id="old"
    )
    with pytest.raises(AnswerLostError, match="messages 0 to 6"):
        await read(client, "old")
    assert (await client.result("old", 60)).status == "ok"
    assert (await read(client, "old", 7))[1].status == "ok"


async def test_messages_lost_out_of_order_or_repeated_come_once(
    pipeline: Pipeline, client: Client
) -> None:
    out = subjects.out("default", "mess")

    async def publish(message: Chunk | Terminal) -> None:
        await pipeline.broker.publish(out, wire.encode(message))

    chunks = [
        Chunk(request_id="mess", seq=seq, chunks=(json.dumps(seq).encode(),)) for seq in range(5)
    ]
    await publish(chunks[0])
    stream = client.stream("mess")
    first = await anext(stream)
    for seq in (3, 1, 1, 4, 2):
        await publish(chunks[seq])
    await publish(Terminal(request_id="mess", seq=5, status="ok", http_status=200, epoch=1))
    rest = [part async for part in stream]
    assert [part.json() for part in (first, *rest[:-1]) if isinstance(part, Part)] == [
        [seq] for seq in range(5)
    ]


async def test_what_an_earlier_owner_says_after_a_takeover_does_not_count(
    pipeline: Pipeline, client: Client
) -> None:
    out = subjects.out("default", "two")

    def chunk(seq: int, epoch: int) -> Chunk:
        text = json.dumps(f"{seq} of {epoch}").encode()
        return Chunk(request_id="two", seq=seq, chunks=(text,), epoch=epoch)

    takeover = Takeover(
        request_id="two", tenant="default", epoch=2, seq=1, decode_instance="decode-2"
    )
    end = {"request_id": "two", "status": "ok", "http_status": 200}
    messages = (
        chunk(0, 1),
        takeover,
        chunk(1, 1),
        Terminal(seq=2, epoch=1, **end),
        chunk(1, 2),
        chunk(2, 2),
        Terminal(seq=3, epoch=2, **end),
    )
    for number, message in enumerate(messages):
        await pipeline.broker.publish_durable(out, wire.encode(message), message_id=f"two.{number}")
    parts, _ = await read(client, "two")
    assert [part.json() for part in parts] == [["0 of 1"], ["1 of 2"], ["2 of 2"]]


async def test_a_reader_that_stops_leaves_nothing_behind(
    pipeline: Pipeline, client: Client
) -> None:
    await pipeline.start(*STAGES)
    request_id = await submit(client, completion(pipeline, "leave", **LONG))
    stream = client.stream(request_id)
    await anext(stream)
    await stream.aclose()
    assert client._answers is not None
    assert not client._answers._live
    async with asyncio.timeout(60):
        assert (await client.result(request_id)).status == "ok"


async def test_a_number_below_0_is_refused(client: Client) -> None:
    with pytest.raises(BadRequestError, match="from_seq"):
        await read(client, "r1", -1)
