"""`headrace batch run`, through the whole pipeline."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.cli.batch import lines as batch_lines
from headrace.cli.batch import run as batch_run
from headrace.cli.batch.run import Batch, Session
from headrace.shared import subjects
from headrace.shared.batch_lines import Line
from headrace.shared.broker import WorkQueue
from headrace.shared.errors import SettingsError
from headrace.shared.served_models import Models
from headrace.shared.settings import ModelSettings, Settings
from headrace.shared.subjects import Lane, Role

from ..pipeline.conftest import STAGES
from .conftest import Client, Engines, Pipeline, completion, expected_text, submit, with_decode

KILLED = -signal.SIGKILL


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(
        input_file=tmp_path / "in.jsonl", output_file=tmp_path / "out.jsonl", tenant="default"
    )


def request(pipeline: Pipeline, custom_id: str, **more: Any) -> dict[str, Any]:
    body = completion(pipeline, f"prompt {custom_id}", **more)
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(batch: Batch, *lines: Any) -> None:
    """Write the input; a string is a line as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    batch.input_file.write_text("".join(f"{text}\n" for text in texts))


def read(batch: Batch) -> list[Any]:
    """Return the output, every line of which must be JSON, and whole."""
    text = batch.output_file.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def texts(results: list[Any]) -> dict[str, str]:
    """Return the answers by their custom_id, of which there must be one each."""
    found = {
        result["custom_id"]: result["response"]["body"]["choices"][0]["text"] for result in results
    }
    assert len(found) == len(results)
    return found


def expected(custom_ids: list[str]) -> dict[str, str]:
    return {custom_id: expected_text(f"prompt {custom_id}", 16) for custom_id in custom_ids}


async def run(batch: Batch, settings: Settings) -> int | None:
    """Run in this process; return the exit code."""
    with batch_run.opened(batch) as (checkpoint, num_bytes):
        session = Session(batch, checkpoint, num_bytes)
        await session.run(settings)
    return session.code


Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest_asyncio.fixture
async def start(batch: Batch, settings: Settings) -> AsyncIterator[Start]:
    """Start the command as a process."""
    processes = []

    async def start(*more: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace.cli.main", "batch", "run"),
            *("-i", str(batch.input_file), "-o", str(batch.output_file)),
            *("--nats-url", settings.broker.url, *more),
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_each_line_has_its_result_and_a_bad_one_is_one_error_with_its_number(
    pipeline: Pipeline, batch: Batch, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    custom_ids = [f"r{number}" for number in range(50)]
    write(
        batch,
        *(request(pipeline, custom_id) for custom_id in custom_ids),
        "no JSON",
        request(pipeline, "r7"),
        "",
        {**request(pipeline, "get"), "method": "GET"},
        request(pipeline, "hot", temperature=-1),
    )
    assert await run(batch, pipeline.settings) == 1
    results = read(batch)
    good = [result for result in results if result["error"] is None]
    assert texts(good) == expected(custom_ids)
    for result in good:
        assert list(result) == ["id", "custom_id", "response", "error"]
        assert list(result["response"]) == ["status_code", "request_id", "body"]
        assert result["response"]["status_code"] == 200
    bad = [result for result in results if result["error"] is not None]
    errors = [(result["error"]["line"], result["error"]["error"]["message"]) for result in bad]
    assert [(line, message[:19]) for line, message in sorted(errors)] == [
        (51, "not a JSON object: "),
        (52, "custom_id 'r7' stan"),
        (54, "method must be 'POS"),
        (55, "Expected `float` >="),
    ]
    assert sorted(result["custom_id"] for result in bad) == ["", "", "get", "hot"]
    assert {result["response"]["status_code"] for result in bad} == {400}
    assert engines[0].num_started == 50
    assert await run(batch, pipeline.settings) == 1
    assert read(batch) == results
    assert engines[0].num_started == 50


async def test_no_more_lines_are_read_than_are_under_way(
    pipeline: Pipeline, batch: Batch, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.start(*STAGES)
    furthest = num_read = 0

    def counted(path: Path) -> Iterator[Line]:
        nonlocal furthest, num_read
        for line in batch_lines.read(path):
            num_read += 1
            num_written = batch.output_file.read_bytes().count(b"\n")
            furthest = max(furthest, num_read - num_written)
            yield line

    monkeypatch.setattr(batch_run, "read", counted)
    write(batch, *(request(pipeline, f"r{number}") for number in range(60)))
    assert await run(dataclasses.replace(batch, concurrency=4), pipeline.settings) == 0
    assert engines[0].max_running <= 4
    assert furthest <= 6  # one that waits for its turn, one whose turn has just begun


async def test_a_killed_command_goes_on_and_nothing_runs_twice(
    pipeline: Pipeline, batch: Batch, engines: Engines, start: Start
) -> None:
    await pipeline.start(*STAGES)
    custom_ids = [f"r{number}" for number in range(300)]
    write(batch, *(request(pipeline, custom_id) for custom_id in custom_ids))
    for kill in range(5):
        process = await start("--concurrency", "4")
        await engines[0].until_started(50 * kill + 20)
        process.kill()
        assert await process.wait() == KILLED
    process = await start("--concurrency", "4")
    assert await process.wait() == 0
    assert texts(read(batch)) == expected(custom_ids)
    assert engines[0].num_started == 300


async def test_what_was_computed_meanwhile_is_not_computed_again(
    pipeline: Pipeline, batch: Batch, engines: Engines, start: Start
) -> None:
    engines.hold = True
    await pipeline.start(*STAGES)
    write(batch, *(request(pipeline, f"r{number}") for number in range(4)))
    process = await start()
    await engines[0].until_running(4)
    process.kill()
    assert await process.wait() == KILLED
    assert read(batch) == []
    engines[0].release()
    await engines[0].until_running(0)
    assert await run(batch, pipeline.settings) == 0
    assert texts(read(batch)) == expected(["r0", "r1", "r2", "r3"])
    assert engines[0].num_started == 4


async def test_an_interrupt_cancels_what_runs_and_keeps_what_is_done(
    pipeline: Pipeline, batch: Batch, engines: Engines, start: Start
) -> None:
    await pipeline.start(*STAGES)
    custom_ids = [f"r{number}" for number in range(8)]
    write(batch, *(request(pipeline, custom_id) for custom_id in custom_ids[:3]))
    assert await run(batch, pipeline.settings) == 0
    engines[0].faults.hold = True
    engines[0]._released.clear()
    write(batch, *(request(pipeline, custom_id) for custom_id in custom_ids))
    process = await start()
    await engines[0].until_running(5)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert "3 ok and 0 failed" in err.decode()
    assert "the same command again goes on" in err.decode()
    await engines[0].until_running(0)
    assert texts(read(batch)) == expected(custom_ids[:3])
    engines[0].release()
    assert await run(batch, pipeline.settings) == 0
    assert texts(read(batch)) == expected(custom_ids)


async def test_a_failed_line_is_run_again_only_when_that_is_asked_for(
    pipeline: Pipeline, batch: Batch, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    good = [request(pipeline, f"r{number}") for number in range(3)]
    write(batch, *good[:2])
    assert await run(batch, pipeline.settings) == 0
    write(batch, *good, "no JSON")
    engines[0].faults.fail_next = 100
    assert await run(batch, pipeline.settings) == 1
    engines[0].faults.fail_next = 0
    before = read(batch)
    assert sorted(result["response"]["status_code"] for result in before) == [200, 200, 400, 500]
    assert await run(batch, pipeline.settings) == 1
    assert read(batch) == before
    num_started = engines[0].num_started
    again = dataclasses.replace(batch, retry_failed=True)
    assert await run(again, pipeline.settings) == 1
    assert engines[0].num_started == num_started + 1
    *answers, bad = sorted(read(batch), key=lambda result: result["custom_id"] or "~")
    assert texts(answers) == expected(["r0", "r1", "r2"])
    assert bad["error"]["line"] == 4
    write(batch, *good, request(pipeline, "r3"))
    assert await run(batch, pipeline.settings) == 0
    assert texts(read(batch)) == expected(["r0", "r1", "r2", "r3"])


async def test_the_result_of_another_request_is_never_taken_for_this_one(
    pipeline: Pipeline, batch: Batch
) -> None:
    await pipeline.start(*STAGES)
    write(batch, request(pipeline, "a"))
    named = dataclasses.replace(batch, run_id=f"run-{pipeline.settings.model.served_name}")
    assert await run(named, pipeline.settings) == 0
    write(batch, request(pipeline, "a", max_tokens=3))
    with pytest.raises(SettingsError, match="custom_id 'a', of another request"):
        await run(named, pipeline.settings)
    batch.output_file.unlink()
    assert await run(named, pipeline.settings) == 0
    assert texts(read(batch)) == {"a": expected_text("prompt a", 3)}


async def test_an_output_that_was_removed_is_computed_anew(
    pipeline: Pipeline, batch: Batch, engines: Engines
) -> None:
    await pipeline.start(*STAGES)
    write(batch, request(pipeline, "a"))
    for num_started in (1, 2):
        assert await run(batch, pipeline.settings) == 0
        assert engines[0].num_started == num_started
        batch.output_file.unlink()


async def test_a_model_that_nobody_serves_is_an_error_and_none_at_all_is_the_only_one(
    pipeline: Pipeline, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "Models", functools.partial(Models, heard_within_s=0.5))
    await pipeline.start(*STAGES)
    unknown, none = request(pipeline, "unknown", model="unknown"), request(pipeline, "none")
    del none["body"]["model"]
    write(batch, unknown, none)
    unnamed = msgspec.structs.replace(pipeline.settings, model=ModelSettings())
    assert await run(batch, unnamed) == 1
    good, bad = sorted(read(batch), key=lambda result: result["custom_id"])
    assert texts([good]) == expected(["none"])
    assert bad["response"]["status_code"] == 404
    assert "`unknown` does not exist" in bad["error"]["error"]["message"]


async def test_a_job_that_is_there_twice_runs_once(
    pipeline: Pipeline, client: Client, engines: Engines
) -> None:
    engines.hold = True
    await pipeline.start(Role.RENDER)
    await submit(client, completion(pipeline, "once"), lane="bulk", request_id="once")
    render = pipeline.heartbeat(Role.RENDER)
    pool = subjects.pool(render.model, render.contract)
    await pipeline.broker.declare_model(render.model, pool)
    taken = await pipeline.broker.take(WorkQueue.job(pool, Lane.BULK), wait_s=60)
    assert taken is not None
    for copy in ("first", "second"):
        await pipeline.broker.publish_durable(taken.subject, taken.payload, message_id=copy)
    await taken.ack()
    one_slot = with_decode(pipeline, slots=1)
    await pipeline.start(Role.PREFILL, Role.DECODE, Role.DERENDER, settings=one_slot)
    await engines[0].until_running(1)
    engines[0].release()
    assert (await client.result("once", 60)).is_ok
    behind = await submit(client, completion(pipeline, "behind"), lane="bulk")
    assert (await client.result(behind, 60)).is_ok
    assert engines[0].num_started == 2
