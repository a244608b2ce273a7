"""Batches from their first line to their files."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.shared.batches import error_file_id, request_id_of
from headrace.shared.subjects import Role

from .conftest import STAGES, Batches, Engines, Pipeline, check


async def test_a_batch_is_run_to_its_end(pipeline: Pipeline, batches: Batches) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    lines = batches.lines(50)
    batch_id = await batches.create(lines)
    record = await batches.until(batch_id)
    assert record.status == "completed"
    assert (record.counts.total, record.counts.completed, record.counts.failed) == (50, 50, 0)
    assert (record.model, record.error_file_id) == (pipeline.settings.model.served_name, None)
    output, errors = await batches.results(batch_id)
    check(lines, output, errors)
    file = await batches.file(record.output_file_id)
    assert file is not None
    assert (file.state, file.num_parts > 0, file.num_bytes > 0) == ("whole", True, True)
    assert await batches.file(error_file_id(batch_id)) is None
    assert {(line["response"]["status_code"], line["error"]) for line in output} == {(200, None)}
    assert record.usage is not None
    assert record.usage.output_tokens == sum(
        line["response"]["body"]["usage"]["completion_tokens"] for line in output
    )


async def test_a_line_that_is_refused_is_a_line_of_the_error_file(
    pipeline: Pipeline, batches: Batches
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    lines = [*batches.lines(5), batches.line("bad", "question", max_tokens=-1)]
    batch_id = await batches.create(lines)
    record = await batches.until(batch_id)
    assert record.status == "completed"
    assert (record.counts.completed, record.counts.failed) == (5, 1)
    output, (error,) = await batches.results(batch_id)
    check(lines, output, [error])
    assert error["custom_id"] == "bad"
    assert error["id"] == error["response"]["request_id"] == request_id_of(batch_id, 6)
    assert error["response"]["status_code"] == 400
    assert "max_tokens" in error["response"]["body"]["error"]["message"]


def wrong_lines(good: dict[str, Any]) -> list[dict[str, Any] | bytes]:
    body = good["body"]
    return [
        good,
        b"no JSON",
        {**good, "custom_id": None},
        good,
        {**good, "custom_id": "4", "method": "GET"},
        {**good, "custom_id": "5", "url": "/v1/chat/completions"},
        {**good, "custom_id": "6", "body": "text"},
        {**good, "custom_id": "7", "body": {**body, "stream": True}},
        {**good, "custom_id": "8", "body": {**body, "model": None}},
        {**good, "custom_id": "9", "body": {**body, "model": "another"}},
    ]


async def test_an_input_with_wrong_lines_fails_and_nothing_of_it_is_run(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    batch_id = await batches.create(wrong_lines(batches.line("a", "question")))
    record = await batches.until(batch_id)
    assert record.status == "failed"
    assert [(error.line, error.code, error.param) for error in record.errors] == [
        (2, "invalid_json_line", None),
        (3, "invalid_custom_id", "custom_id"),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_method", "method"),
        (6, "invalid_url", "url"),
        (7, "invalid_body", "body"),
        (8, "invalid_body", "stream"),
        (9, "missing_model", "model"),
        (10, "model_not_found", "body.model"),
    ]
    assert sum(engine.num_started for engine in engines) == 0
    assert await batches.results(batch_id) == ([], [])


@pytest.mark.parametrize(
    ("lines", "code"), [([b" ", b""], "empty_file"), ([b"{}"] * 4, "too_many_lines")]
)
async def test_a_batch_has_one_line_at_least_and_no_more_than_the_setting(
    pipeline: Pipeline, batches: Batches, lines: list[Any], code: str
) -> None:
    limits = msgspec.structs.replace(pipeline.settings.batch, max_lines=3)
    await pipeline.start(
        Role.BATCH, settings=msgspec.structs.replace(pipeline.settings, batch=limits)
    )
    record = await batches.until(await batches.create(lines))
    assert (record.status, [error.code for error in record.errors]) == ("failed", [code])


async def test_a_batch_whose_input_is_gone_fails(pipeline: Pipeline, batches: Batches) -> None:
    batch_id = await batches.create(batches.lines(3))
    source = (await batches.get(batch_id)).input_file_id
    await batches.store.delete("acme", source)
    await pipeline.start(Role.BATCH)
    record = await batches.until(batch_id)
    assert (record.status, record.errors[0].code) == ("failed", "input_file_gone")


async def test_results_can_be_read_while_a_batch_runs(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    engine = engines[0]
    first = await batches.create(batches.lines(4))
    await batches.until(first)
    engine.faults.hold = True
    lines = [*batches.lines(6), batches.line("refused at once", "x", max_tokens=-1)]
    batch_id = await batches.create(lines)
    await engine.until_running(6)
    record = await batches.until(batch_id, lambda record: record.error_file_id is not None)
    assert record.status == "in_progress"
    (error,) = await batches.content(record.error_file_id)
    assert error["custom_id"] == "refused at once"
    engine.release()
    record = await batches.until(batch_id)
    check(lines, *await batches.results(batch_id))


async def test_a_cancelled_batch_keeps_what_is_done_and_frees_the_engine(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    engine = engines[0]
    lines = batches.lines(300)
    engine.faults.hold = True
    batch_id = await batches.create([batches.line("refused", "a", max_tokens=-1), *lines])
    await engine.until_running(8)  # the first window
    await batches.cancel(batch_id)
    record = await batches.until(batch_id)
    assert record.status == "cancelled"
    assert record.cancelled_at is not None
    output, errors = await batches.results(batch_id)
    check([{"custom_id": "refused"}, *lines], output, errors)
    codes = {line["custom_id"]: (line["error"] or {}).get("code") for line in errors}
    assert codes.pop("refused") is None
    assert set(codes.values()) == {"batch_cancelled"}
    await engine.until_running(0)
    assert engine.num_started < 50


async def test_a_batch_that_is_cancelled_before_it_is_taken_runs_nothing(
    pipeline: Pipeline, batches: Batches
) -> None:
    batch_id = await batches.create(batches.lines(3))
    await batches.cancel(batch_id)
    await pipeline.start(Role.BATCH)
    record = await batches.until(batch_id)
    assert (record.status, record.counts.total) == ("cancelled", 0)


async def test_a_batch_past_its_window_expires_with_what_is_done(
    pipeline: Pipeline, batches: Batches, engines: Engines
) -> None:
    await pipeline.start(*STAGES, Role.BATCH)
    engines[0].faults.hold = True
    lines = batches.lines(40)
    batch_id = await batches.create(
        [batches.line("refused", "a", max_tokens=-1), *lines], window_s=6
    )
    record = await batches.until(batch_id)
    assert record.status == "expired"
    assert record.expired_at is not None
    output, errors = await batches.results(batch_id)
    check([{"custom_id": "refused"}, *lines], output, errors)
    assert {(line["error"] or {}).get("code") for line in errors} == {None, "batch_expired"}
    assert (record.counts.completed, record.counts.failed) == (0, 41)
    await engines[0].until_running(0)


async def test_more_batches_than_slots_are_run_one_after_another(
    pipeline: Pipeline, batches: Batches
) -> None:
    one = msgspec.structs.replace(pipeline.settings.batch, slots=1)
    await pipeline.start(*STAGES)
    await pipeline.start(Role.BATCH, settings=msgspec.structs.replace(pipeline.settings, batch=one))
    made = [await batches.create(batches.lines(5)) for _ in range(3)]
    for batch_id in made:
        assert (await batches.until(batch_id)).status == "completed"
        check(batches.lines(5), *await batches.results(batch_id))
