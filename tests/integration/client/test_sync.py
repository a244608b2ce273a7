"""The blocking client: the same pipeline, from code without an event loop."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.client import Part, Result
from headrace.client.sync import Client
from headrace.shared.errors import BadRequestError, BrokerError

from ..pipeline.conftest import STAGES
from .conftest import Engines, Pipeline, completion, expected_text

HELD = """
import asyncio, sys
from headrace.client import Client
from headrace.client.sync import Client as SyncClient

url, model, kind = sys.argv[1:]
bodies = [{"model": model, "prompt": "held"}] * 3

async def main():
    async with Client(url) as client:
        async for _ in client.map(bodies, endpoint="completions"):
            pass

if kind == "async":
    asyncio.run(main())
else:
    with SyncClient(url) as client:
        for _ in client.map(bodies, endpoint="completions"):
            pass
"""


async def test_every_method_blocks_and_the_thread_ends(pipeline: Pipeline) -> None:
    await pipeline.start(*STAGES)

    def use() -> None:
        with Client(pipeline.settings.broker) as client:
            body = completion(pipeline, "blocking")
            result = client.result(client.submit(body, endpoint="completions"), 60)
            assert result.json()["choices"][0]["text"] == expected_text("blocking", 16)
            streamed = client.submit({**body, "stream": True}, endpoint="completions")
            *parts, end = client.stream(streamed)
            assert all(isinstance(part, Part) for part in parts)
            assert isinstance(end, Result)
            bodies = (completion(pipeline, f"b{n}") for n in range(40))
            results = client.map(bodies, endpoint="completions", concurrency=8)
            assert sorted(index for index, _ in results) == list(range(40))
            ordered = client.map([body] * 20, endpoint="completions", concurrency=4, ordered=True)
            assert [index for index, _ in ordered] == list(range(20))
            client.cancel(streamed)
        client.close()  # again, which does nothing
        with pytest.raises(BrokerError, match="closed"):
            client.result("r1")

    await asyncio.to_thread(use)
    assert "headrace-client" not in {thread.name for thread in threading.enumerate()}


async def test_who_waits_in_another_thread_is_told_when_it_is_closed(pipeline: Pipeline) -> None:
    def use() -> None:
        client = Client(pipeline.settings.broker)
        with ThreadPoolExecutor() as other:
            waiting = other.submit(client.result, "never", 3600)
            answers = client._client._answers
            assert answers is not None
            while not answers._live:
                client._call(asyncio.sleep(0))
            client.close()
            with pytest.raises(BrokerError, match="closed"):
                waiting.result(60)

    await asyncio.to_thread(use)


async def test_what_runs_on_its_loop_ends_when_it_is_closed(pipeline: Pipeline) -> None:
    def use() -> None:
        client = Client(pipeline.settings.broker)
        with ThreadPoolExecutor() as other:
            waiting = other.submit(client._call, asyncio.Event().wait())
            while not waiting.running():
                client._call(asyncio.sleep(0))
            client.close()
            with pytest.raises(BrokerError, match="closed"):
                waiting.result(60)

    await asyncio.to_thread(use)


async def test_errors_are_raised_where_the_method_was_called(pipeline: Pipeline) -> None:
    def use() -> None:
        with (
            Client(pipeline.settings.broker) as client,
            pytest.raises(BadRequestError, match="`model`"),
        ):
            client.submit({})
        with pytest.raises(BrokerError, match="no broker"):
            Client("nats://127.0.0.1:1", connect_timeout_s=0.1)

    await asyncio.to_thread(use)
    assert "headrace-client" not in {thread.name for thread in threading.enumerate()}


async def test_a_map_that_is_left_cancels_what_is_under_way(
    pipeline: Pipeline, engines: Engines
) -> None:
    engines.hold = True
    await pipeline.start(*STAGES)
    loop = asyncio.get_running_loop()

    def use() -> None:
        held = completion(pipeline, "held")
        with Client(pipeline.settings.broker) as client:
            results = client.map([held, held, {}], endpoint="completions", concurrency=3)
            assert next(results)[1].http_status == 400
            asyncio.run_coroutine_threadsafe(engines[0].until_running(2), loop).result()
            results.close()

    await asyncio.to_thread(use)
    await engines[0].until_running(0)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_ctrl_c_cancels_what_is_under_way(
    pipeline: Pipeline, engines: Engines, kind: str
) -> None:
    engines.hold = True
    await pipeline.start(*STAGES)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HELD),
        *(pipeline.settings.broker.url, pipeline.settings.model.served_name, kind),
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    await engines[0].until_running(3)
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert process.returncode == -signal.SIGINT
    assert errors.decode().splitlines()[-1] == "KeyboardInterrupt"
    await engines[0].until_running(0)
