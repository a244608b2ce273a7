"""`headrace top` on a stack that works."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from headrace.cli.main import build_parser
from headrace.cli.top import run as top
from headrace.cli.top.frame import Frame, Rates, frame
from headrace.cli.top.run import Eye
from headrace.client import Client
from headrace.shared.broker import Broker
from headrace.shared.subjects import Lane, Role

from .conftest import STAGES, Engines, Pipeline
from .test_faults import completion, pool_of


async def shown(pipeline: Pipeline, broker: Broker | None = None) -> Frame:
    return frame(await Eye(broker or pipeline.broker, pipeline.table).look(), Rates())


def queue(look: Frame, pool: str, lane: Lane) -> Any:
    wanted = (Role.DECODE, pool, lane)
    (row,) = [row for row in look.queues or () if (row.stage, row.model, row.lane) == wanted]
    return row


async def test_a_request_that_runs_and_one_that_waits_are_seen(
    pipeline: Pipeline, client: httpx.AsyncClient, held: Engines
) -> None:
    decode = msgspec.structs.replace(pipeline.settings.decode, slots=1)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=decode)
    await pipeline.start(Role.GATEWAY, *STAGES)
    pool = pool_of(pipeline)
    model = pipeline.settings.model.served_name
    running = asyncio.create_task(
        client.post(
            "/v1/completions",
            json=completion(pipeline, "one"),
            headers={"X-Request-Id": f"first-{model}"},
        )
    )
    await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
    async with Client(pipeline.settings.broker) as other:
        waiting = await other.submit(completion(pipeline, "two"), endpoint="completions")
        while (
            not queue(look := await shown(pipeline), pool, Lane.STD).num_waiting or not look.running
        ):
            pass  # render has the second, and decode's heartbeat tells of the first
        assert {w.role for w in look.workers if w.model in (model, "")} >= {Role.GATEWAY, *STAGES}
        assert (queue(look, pool, Lane.RT).num_taken, queue(look, pool, Lane.RT).oldest_s) == (
            1,
            None,
        )
        assert queue(look, pool, Lane.STD).oldest_s is not None
        assert look.running is not None
        assert [r.request_id for r in look.running if r.model == pool] == [f"first-{model}"]
        held.decode[0].release()
        await running
        assert (await other.result(waiting)).status == "ok"
    look = await shown(pipeline)
    assert look.running is not None
    assert [r for r in look.running if r.model == pool] == []


async def test_one_look_is_printed_as_json_or_as_text(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    await pipeline.start(*STAGES)
    for form in ("--json", "--once"):
        options = build_parser().parse_args(["top", form])
        await top.show(options, pipeline.settings.broker)
    text = capsys.readouterr().out
    document, end = json.JSONDecoder().raw_decode(text)
    assert set(document) == {"time", "workers", "queues", "running", "num_dead_letters"}
    assert set(msgspec.convert(document, Frame).__struct_fields__) == set(document)
    assert text[end:].lstrip().startswith("headrace top ")
    assert "LONGEST-RUNNING REQUEST" in text
