"""One trace a request, through every service: its spans, and how they agree with what the request itself says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.client import Client
from headrace.shared import spans, tracing
from headrace.shared.messages import Timings
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role

from .conftest import STAGES, Pipeline

BATCH = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Every service's spans, once it has ended."""
    exporter = InMemorySpanExporter()

    class Shared(
        InMemorySpanExporter
    ):  # the first service that ends must not close it for the others
        def export(self, spans: Any) -> Any:
            return exporter.export(spans)

    def new_exporter(env: Mapping[str, str]) -> InMemorySpanExporter:
        return Shared()

    monkeypatch.setattr(tracing, "new_exporter", new_exporter)
    return exporter


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Engines that take their time: else a request is nothing but the ways between the stages."""
    fake = msgspec.structs.replace(settings.fake, step_s=0.02, prefill_s_per_1k=2.0)
    return msgspec.structs.replace(settings, fake=fake)


async def ended(pipeline: Pipeline) -> None:
    for service in pipeline.services:
        await service.drain()


def by_name(found: tuple[ReadableSpan, ...]) -> dict[str, ReadableSpan]:
    """Return the spans of one request; a wait is `queue` and the stage before which it was."""
    named = {}
    for span in found:
        template = (span.attributes or {}).get(spans.MESSAGING_TEMPLATE)
        name = span.name if template is None else f"queue {str(template).split('.')[2]}"
        assert name not in named, f"two spans {name}"
        named[name] = span
    return named


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def covered(times: list[tuple[int, int]], until: int) -> float:
    """Return how many seconds before `until` lie in at least one of these."""
    total, seen = 0, 0
    for start, end in sorted(times):
        total += max(0, min(end, until) - max(start, seen))
        seen = max(seen, end)
    return total / 1e9


def times(span: ReadableSpan) -> tuple[int, int]:
    return span.start_time or 0, span.end_time or 0


async def test_a_request_is_one_trace_whose_spans_explain_its_time(
    pipeline: Pipeline, client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    model = pipeline.settings.model.served_name
    answer = await client.post(
        "/v1/completions",
        json={"model": model, "prompt": "x" * 200, "max_tokens": 40, "stream": True},
        headers={"traceparent": BATCH},
    )
    assert answer.status_code == 200, answer.text
    record = (await client.get(f"/requests/{answer.headers['x-request-id']}")).json()
    timings = msgspec.convert(record["timings"], Timings)
    await ended(pipeline)

    named = by_name(exporter.get_finished_spans())
    root = named.pop(f"text_completion {model}")
    assert set(named) == {
        "queue req",
        spans.RENDER,
        "queue job",
        spans.PREFILL_WAIT,
        "queue pf",
        spans.PREFILL,
        spans.DECODE,
        spans.KV_TRANSFER,
        spans.DERENDER,
    }
    # One trace, which is the client's; and who lies in whom.
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == BATCH.split("-")[2]
    assert {f"{span.context.trace_id:032x}" for span in [root, *named.values()]} == {
        BATCH.split("-")[1]
    }
    inside = {name: span.parent.span_id for name, span in named.items() if span.parent}
    own = {name: span.context.span_id for name, span in named.items()}
    assert inside.pop("queue pf") == inside.pop(spans.PREFILL) == own[spans.PREFILL_WAIT]
    assert inside.pop(spans.KV_TRANSFER) == own[spans.DECODE]
    assert set(inside.values()) == {root.context.span_id}
    services = {str(span.resource.attributes["service.name"]) for span in [root, *named.values()]}
    assert services == {f"headrace-{role}" for role in (Role.GATEWAY, *STAGES)}

    # The spans say what the request's own timings say.
    for name, expected in {
        "queue req": timings.render_queue_s,
        spans.RENDER: timings.render_s,
        "queue job": timings.decode_queue_s,
        "queue pf": timings.prefill_queue_s,
        spans.PREFILL: timings.prefill_s,
        spans.KV_TRANSFER: timings.kv_transfer_s,
    }.items():
        assert seconds(named[name]) == pytest.approx(expected, abs=1e-3), name
    # And the timings explain the time to the first token: each was measured, none is what the others leave over.
    measured = (
        timings.render_queue_s,
        timings.render_s,
        timings.decode_queue_s,
        timings.prefill_wait_s,
        timings.first_step_s,
    )
    assert None not in measured
    total = sum(part or 0.0 for part in measured)
    assert 0.95 * (timings.first_token_s or 0.0) <= total <= (timings.first_token_s or 0.0) + 1e-3
    (first_token,) = named[spans.DECODE].events
    assert first_token.timestamp / 1e9 - record["accepted"] == pytest.approx(
        timings.first_token_s, abs=1e-3
    )
    attributes = named[spans.KV_TRANSFER].attributes or {}
    assert attributes[spans.KV_BYTES] == timings.kv_transfer_bytes
    assert attributes[spans.KV_DESCRIPTORS] == 2  # 200 token IDs, 128 a block
    post, wire, notice = (attributes[spans.KV_PART_MS + p] for p in ("post", "wire", "notice"))
    assert (post, notice) == (0.0, 0.0)
    assert wire == attributes[spans.KV_MS]

    # In this order, they explain where the time went; derender works beside decode.
    order = ["queue req", spans.RENDER, "queue job", spans.PREFILL_WAIT, spans.DECODE]
    for before, after in itertools.pairwise(order):
        assert (named[before].end_time or 0) <= (named[after].start_time or 0) + 1_000_000
    tiles = [times(named[name]) for name in order]
    begun, ended_at = times(root)
    to_first_token_s = (first_token.timestamp - begun) / 1e9
    assert covered(tiles, first_token.timestamp) >= 0.95 * to_first_token_s
    behind_decode = (tiles[-1][1], times(named[spans.DERENDER])[1])
    assert covered([*tiles, behind_decode], ended_at) >= 0.95 * seconds(root)


async def test_a_line_of_a_batch_is_a_trace_of_its_own_that_is_linked_to_the_batch(
    pipeline: Pipeline, exporter: InMemorySpanExporter
) -> None:
    await pipeline.start(*STAGES)
    settings = pipeline.settings
    async with Client(settings.broker.url) as client:
        body = {"model": settings.model.served_name, "prompt": "hello", "max_tokens": 5}
        for lane in (Lane.BULK, Lane.STD):
            await client.run(body, endpoint="completions", lane=lane, traceparent=BATCH)
    await ended(pipeline)

    renders = [span for span in exporter.get_finished_spans() if span.name == spans.RENDER]
    bulk, std = sorted(renders, key=lambda span: str((span.attributes or {})[spans.LANE]))
    batch_trace = int(BATCH.split("-")[1], 16)
    assert bulk.context.trace_id != batch_trace
    assert bulk.parent is None
    assert [link.context.trace_id for link in bulk.links] == [batch_trace]
    decodes = [span for span in exporter.get_finished_spans() if span.name == spans.DECODE]
    assert {span.context.trace_id for span in decodes} == {bulk.context.trace_id, batch_trace}
    assert std.context.trace_id == batch_trace
    assert std.links == ()


async def test_a_trace_that_its_client_does_not_sample_is_not_recorded(
    pipeline: Pipeline, client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await pipeline.start(Role.GATEWAY, *STAGES)
    body = {"model": pipeline.settings.model.served_name, "prompt": "hello", "max_tokens": 5}
    unsampled = f"{BATCH[:-2]}00"
    answer = await client.post("/v1/completions", json=body, headers={"traceparent": unsampled})
    assert answer.status_code == 200, answer.text
    await ended(pipeline)
    assert exporter.get_finished_spans() == ()
