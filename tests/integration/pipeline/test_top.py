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
from headrace.shared.nats_server import NatsServer
from headrace.shared.subjects import Lane, Role

from .conftest import STAGES, Engines, Pipeline
from .test_faults import completion, pool_of


@pytest.fixture(scope="module")
def nats_server(module_server: NatsServer) -> NatsServer:
    """A broker of this module's own: what other tests left behind has run for longer, and would be shown instead."""
    return module_server


async def shown(pipeline: Pipeline, broker: Broker | None = None) -> Frame:
    return frame(await Eye(broker or pipeline.broker, pipeline.table).look(), Rates())


def queue(look: Frame, pool: str, lane: Lane) -> Any:
    wanted = (Role.DECODE, pool, lane)
    (row,) = [row for row in look.queues or () if (row.stage, row.model, row.lane) == wanted]
    return row


def ids(look: Frame, pool: str) -> list[str | None]:
    """Return the requests that run, longest first."""
    assert look.running is not None
    return [row.request_id for row in look.running if row.model == pool]


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
        while not (
            queue(look := await shown(pipeline), pool, Lane.STD).num_waiting and ids(look, pool)
        ):
            pass  # render has the second, and the broker counts the first as taken
        assert {w.role for w in look.workers if w.model in (model, "")} >= {Role.GATEWAY, *STAGES}
        assert (queue(look, pool, Lane.RT).num_taken, queue(look, pool, Lane.RT).oldest_s) == (
            1,
            None,
        )
        assert queue(look, pool, Lane.STD).oldest_s is not None
        assert ids(look, pool) == [f"first-{model}"]
        held.decode[0].release()
        await running
        assert (await other.result(waiting)).status == "ok"
    while ids(await shown(pipeline), pool):
        pass  # decode acks a job after its end was told


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
