"""The trace of a batch, and those of its lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.shared import spans, tracing
from headrace.shared.subjects import Role

from .conftest import STAGES, Batches, Pipeline

NUM_LINES = 5


async def test_each_line_is_a_trace_of_its_own_that_is_linked_to_the_batchs(
    pipeline: Pipeline, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = InMemorySpanExporter()

    class Exporter(InMemorySpanExporter):  # the first service that ends closes its own alone
        def export(self, spans: Any) -> Any:
            return kept.export(spans)

    def new_exporter(env: Mapping[str, str]) -> Exporter:
        return Exporter()

    monkeypatch.setattr(tracing, "new_exporter", new_exporter)
    await pipeline.start(*STAGES, Role.BATCH)
    batch_id = await batches.create(batches.lines(NUM_LINES))
    await batches.until(batch_id)
    for service in pipeline.services:
        await service.drain()

    found = kept.get_finished_spans()
    (batch,) = [span for span in found if span.name == spans.BATCH]
    assert batch.parent is None
    assert batch.attributes is not None
    assert batch.attributes[spans.BATCH_ID] == batch_id
    assert batch.attributes[spans.NUM_LINES] == NUM_LINES
    lines = [span for span in found if span.name == spans.RENDER]
    assert [link.context for span in lines for link in span.links] == [batch.context] * NUM_LINES
    assert len({span.context.trace_id for span in [batch, *lines]}) == NUM_LINES + 1
