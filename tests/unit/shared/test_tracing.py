from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from headrace.shared import spans, tracing
from headrace.shared.errors import SettingsError
from headrace.shared.span_maker import MAX_CONTEXTS, Noted, SpanMaker

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = f"{PARENT[:-2]}00"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()

    def new_exporter(env: Mapping[str, str]) -> InMemorySpanExporter:
        return exporter

    monkeypatch.setattr(tracing, "new_exporter", new_exporter)
    return exporter


def test_the_words_of_the_spans_are_opentelemetrys() -> None:
    words = {
        word
        for module in (gen_ai_attributes, messaging_attributes, error_attributes, http_attributes)
        for word in vars(module).values()
        if isinstance(word, str)
    }
    prefixes = ("gen_ai.", "messaging.", "error.", "http.")
    used = {word for word in vars(spans).values() if str(word).startswith(prefixes)}
    assert len(used) > 10
    assert used - words == set()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_without_an_exporter_there_are_no_traces_and_a_context_is_passed_on(
    env: dict[str, str],
) -> None:
    tracer = tracing.start("render", "render-1", env)
    assert tracer is tracing.OFF
    assert tracer.begin(PARENT) == PARENT
    assert tracer.begin(None) is None


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
    ],
)
def test_a_wrong_exporter_is_refused_by_the_variables_name(env: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        tracing.start("render", "render-1", env)


@pytest.mark.parametrize("protocol", ["", "http/protobuf", "http/json", "grpc"])
async def test_an_endpoint_alone_turns_traces_on(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    if protocol:
        env["OTEL_EXPORTER_OTLP_PROTOCOL"] = protocol
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    tracer = tracing.start("render", "render-1", env)
    assert tracer.is_on
    await tracer.close()


async def test_grpc_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    env = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(SettingsError, match="not installed"):
        tracing.start("render", "render-1", env)


async def test_a_span_lies_under_the_context_that_came(exporter: InMemorySpanExporter) -> None:
    tracer = tracing.start("render", "render-1", {})
    own = tracer.begin(PARENT)
    assert own is not None
    tracer.span("decode", PARENT, 1.0, 3.5, own=own, events=[("first token", 2.0)], error="bad")
    await tracer.close()
    (span,) = exporter.get_finished_spans()
    assert own.split("-")[1:3] == [f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"]
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert (span.start_time, span.end_time) == (1_000_000_000, 3_500_000_000)
    assert span.events[0].timestamp == 2_000_000_000
    assert not span.status.is_ok
    assert span.resource.attributes["service.name"] == "headrace-render"
    assert span.resource.attributes["service.instance.id"] == "render-1"


@pytest.mark.parametrize(
    ("sampler", "flags"),
    [
        (None, ["01", "01", "00"]),
        ("parentbased_always_off", ["00", "01", "00"]),
        ("always_on", ["01", "01", "01"]),
        ("always_off", ["00", "00", "00"]),
    ],
)
async def test_the_sampler_of_the_environment_decides_which_traces_are_sampled(
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str | None,
    flags: list[str],
) -> None:
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    tracer = tracing.start("render", "render-1", {})
    contexts = [tracer.begin(parent) for parent in (None, PARENT, UNSAMPLED)]
    assert [None if context is None else context[-2:] for context in contexts] == flags
    assert [context.split("-")[1] for context in contexts[1:] if context] == [
        PARENT.split("-")[1]
    ] * 2
    for context in contexts:
        tracer.span("render", context, 1.0, 2.0)
    await tracer.close()
    traces = [f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()]
    assert traces == [
        context.split("-")[1] for context in contexts if context and context.endswith("01")
    ]


@pytest.mark.parametrize("parent", [PARENT, UNSAMPLED], ids=["sampled", "unsampled"])
async def test_a_child_is_of_its_parents_trace_and_sampled_as_that_is(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")  # decides where a trace begins
    tracer = tracing.start("decode", "decode-1", {})
    own = tracer.child(parent)
    assert own is not None
    assert own != parent
    assert (own.split("-")[1], own[-2:]) == (parent.split("-")[1], parent[-2:])
    tracer.span("prefill.wait", parent, 1.0, 2.0, own=own)
    await tracer.close()
    spans = [f"{span.context.span_id:016x}" for span in exporter.get_finished_spans()]
    assert spans == ([own.split("-")[2]] if parent == PARENT else [])
    assert tracer.child(None) is None


def test_what_a_context_was_read_as_is_not_kept_for_ever(exporter: InMemorySpanExporter) -> None:
    maker = SpanMaker(exporter, Resource({}), "1", RandomIdGenerator())
    for number in range(1, MAX_CONTEXTS + 10):
        parent = f"00-{number:032x}-{number:016x}-01"
        maker.export([Noted("render", parent, None, 1.0, 2.0, "internal", None, (), None, None)])
    assert len(maker._contexts) == MAX_CONTEXTS  # what is read is not kept for ever
    assert len(exporter.get_finished_spans()) == MAX_CONTEXTS + 9


async def test_what_a_stage_notes_is_no_span_yet(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[str] = []

    def made(maker: SpanMaker, noted: Noted) -> None:
        made_in.append(threading.current_thread().name)

    monkeypatch.setattr(SpanMaker, "_made", made)
    tracer = tracing.start("render", "render-1", {})
    tracer.span("render", PARENT, 1.0, 2.0)
    await tracer.close()
    assert len(made_in) == 1
    assert threading.current_thread().name not in made_in


async def test_spans_are_made_of_a_note_in_the_thread_that_sends_them(
    exporter: InMemorySpanExporter,
) -> None:
    made_in: list[str] = []

    def make(tracer: tracing.Tracer, name: str) -> None:
        made_in.append(threading.current_thread().name)
        own = tracer.child(PARENT)
        tracer.span("kv.transfer", own, 1.0, 2.0)
        tracer.span(name, PARENT, 1.0, 3.0, own=own)

    tracer = tracing.start("decode", "decode-1", {})
    tracer.note(PARENT, make, "decode")
    await tracer.close()
    transfer, decode = exporter.get_finished_spans()
    assert (transfer.name, decode.name) == ("kv.transfer", "decode")
    assert transfer.parent is not None
    assert transfer.parent.span_id == decode.context.span_id
    assert len(made_in) == 1
    assert threading.current_thread().name not in made_in


async def test_nothing_is_made_of_a_note_in_a_trace_that_is_not_sampled(
    exporter: InMemorySpanExporter,
) -> None:
    def make(tracer: tracing.Tracer, above: str | None) -> None:
        tracer.span("decode", above, 1.0, 2.0)

    tracer = tracing.start("decode", "decode-1", {})
    for above in (None, f"{PARENT[:-2]}00", PARENT):
        tracer.note(above, make, above)
        tracing.OFF.note(above, make, above)
    await tracer.close()
    assert len(exporter.get_finished_spans()) == 1


async def test_a_note_of_which_no_span_can_be_made_costs_no_other(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(tracer: tracing.Tracer) -> None:
        raise ValueError("injected")

    tracer = tracing.start("decode", "decode-1", {})
    tracer.note(PARENT, fail)
    tracer.span("decode", PARENT, 1.0, 2.0)
    await tracer.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["decode"]
    assert [record.__dict__.get("action") for record in caplog.records] == ["span_failed"]


@pytest.mark.parametrize("size", ["", "7"])
async def test_the_size_of_a_batch_is_the_variables_where_it_is_set(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    sizes: list[int] = []
    taken = exporter.export

    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sizes.append(len(spans))
        return taken(spans)

    monkeypatch.setattr(exporter, "export", export)
    monkeypatch.setenv(tracing.BATCH_SIZE, size)
    tracer = tracing.start("decode", "decode-1", {})
    for _ in range(7 * 100):
        tracer.span("decode", PARENT, 1.0, 2.0)
    await tracer.close()
    assert set(sizes) == ({7} if size else {700})


async def test_a_queue_may_be_smaller_than_a_batch_is_by_default(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.QUEUE_SIZE, "600")
    tracer = tracing.start("decode", "decode-1", {})
    tracer.span("decode", PARENT, 1.0, 2.0)
    await tracer.close()
    assert len(exporter.get_finished_spans()) == 1


@pytest.mark.parametrize("broken", ["x", f"{PARENT}-", f"00-{'0' * 32}-{'0' * 16}-01"])
async def test_a_broken_context_begins_a_new_trace_and_fails_nothing(
    exporter: InMemorySpanExporter, broken: str
) -> None:
    tracer = tracing.start("render", "render-1", {})
    tracer.span("render", broken, 1.0, 2.0)
    assert tracer.begin(broken) is not None
    await tracer.close()
    assert exporter.get_finished_spans() == ()
