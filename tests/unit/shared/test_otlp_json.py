"""The JSON that a collector gets, read back as OTLP's own messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from headrace.shared import tracing
from headrace.shared.errors import SettingsError
from headrace.shared.otlp_json import OtlpJsonExporter, Writer
from headrace.shared.span_maker import MAX_CONTEXTS, Noted, SpanMaker

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LINK = "00-5bf92f3577b34da6a3ce929d0e0e4736-01f067aa0ba902b7-01"
OWN = "00-4bf92f3577b34da6a3ce929d0e0e4736-02f067aa0ba902b7-01"
ROOT = "00-6bf92f3577b34da6a3ce929d0e0e4736-03f067aa0ba902b7-01"
RESOURCE = Resource({"service.name": "headrace-decode", "service.instance.id": "decode-1"})


@dataclass
class Collector:
    """Keeps what it is sent."""

    url: str = ""
    http_status: int = 200
    posts: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.posts.append((self.path, dict(self.headers), body))
            self.send_response(kept.http_status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept.url = f"http://127.0.0.1:{server.server_port}"
    yield kept
    server.shutdown()
    server.server_close()


@pytest.fixture
def noted() -> list[Noted]:
    """Spans of all sorts, as a process hands them in."""
    attributes: dict[str, Any] = {
        **{"a": 'text, "quoted" \\ and ü', "b": True, "c": -(2**40), "d": 0.25, "e": ["x", "y"]},
        **{"f": 1e-7, "g": False, "h": "\u2028\n\x00"},
    }
    first = [("first token", 2.0)]
    return [
        Noted("chat m", None, ROOT, 1.5, 2.5, "server", {}, (), LINK, None),
        Noted("decode", PARENT, OWN, 1.0, 3.0, "consumer", attributes, first, None, "engine"),
        Noted("prefill", PARENT, OWN, 2.0, 1.0, "internal", None, (), None, "engine"),
    ]


def writer() -> Writer:
    return Writer(RESOURCE, "0.1", RandomIdGenerator())


def exporter_to(env: dict[str, str]) -> OtlpJsonExporter:
    exporter = OtlpJsonExporter(env)
    exporter.describe(RESOURCE, "0.1", RandomIdGenerator())
    return exporter


def stripped(request: Any) -> Any:
    """Return a request without what only the library says: whether a parent came from elsewhere, an empty status."""
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                span.flags = 0
                if not span.status.code:
                    span.ClearField("status")
                for link in span.links:
                    link.flags = 0
    return request


def test_the_json_says_what_the_librarys_protobuf_says(noted: list[Noted]) -> None:
    kept = InMemorySpanExporter()
    SpanMaker(kept, RESOURCE, "0.1", RandomIdGenerator()).export(noted)
    as_json = msgspec.json.decode(writer().request_of(noted))
    for resource in as_json["resourceSpans"]:  # OTLP has hex where protobuf's own JSON has base64
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for ids in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in ids:
                            ids[name] = msgspec.json.decode(
                                msgspec.json.encode(bytes.fromhex(ids[name]))
                            )
    read = json_format.ParseDict(as_json, ExportTraceServiceRequest())
    assert stripped(read) == stripped(encode_spans(kept.get_finished_spans()))


def spans_of(body: bytes) -> list[dict[str, Any]]:
    (resource,) = msgspec.json.decode(body)["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    found: list[dict[str, Any]] = scope["spans"]
    return found


def test_a_span_that_nobody_named_gets_an_id_below_its_parent() -> None:
    one = Noted("render", PARENT, None, 1.0, 2.0, "internal", None, (), None, None)
    first, second = spans_of(writer().request_of([one, one]))
    assert (first["traceId"], first["parentSpanId"]) == tuple(PARENT.split("-")[1:3])
    assert len({first["spanId"], second["spanId"], first["parentSpanId"]}) == 3


@pytest.mark.parametrize("broken", ["x", f"{PARENT}-", f"00-{'0' * 32}-{'0' * 16}-01", None])
def test_a_span_of_a_broken_context_is_left_out_and_costs_no_other(
    noted: list[Noted], broken: str | None
) -> None:
    one = Noted("render", broken, None, 1.0, 2.0, "internal", None, (), None, None)
    assert len(spans_of(writer().request_of([one, noted[0]]))) == 1
    assert writer().request_of([one]) == b""


def test_a_value_that_json_has_not_costs_no_span() -> None:
    values = {"a": float("nan"), "b": float("inf"), "c": "half \ud800"}
    one = Noted("render", PARENT, None, 1.0, 2.0, "internal", values, (), None, None)
    (span,) = spans_of(writer().request_of([one]))
    assert [attribute["value"] for attribute in span["attributes"]] == [
        {"doubleValue": "NaN"},
        {"doubleValue": "NaN"},
        {"stringValue": "half ?"},
    ]


def test_what_a_context_was_read_as_is_not_kept_for_ever() -> None:
    written = writer()
    for number in range(1, MAX_CONTEXTS + 10):
        parent = f"00-{number:032x}-{number:016x}-01"
        written.request_of([Noted("x", parent, None, 1.0, 2.0, "internal", None, (), None, None)])
    assert len(written._contexts) == MAX_CONTEXTS


def test_spans_are_posted_where_and_how_the_variables_say(
    noted: list[Noted], collector: Collector
) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.url}/",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-token=a%20b",
    }
    exporter = exporter_to(env)
    assert exporter.export(noted) is SpanExportResult.SUCCESS
    own = exporter_to({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/x"})
    assert own.export(noted) is SpanExportResult.SUCCESS
    exporter.shutdown()
    own.shutdown()
    assert [path for path, _, _ in collector.posts] == ["/v1/traces", "/x"]
    headers = collector.posts[0][1]
    assert (headers["x-token"], headers["Content-Type"]) == ("a b", "application/json")


async def test_what_a_stage_hands_in_is_posted_with_the_processs_own_name(
    collector: Collector,
) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
    }
    tracer = tracing.start("render", "render-1", env)
    tracer.span("render", PARENT, 1.0, 2.0)
    await tracer.close()
    ((_, _, body),) = collector.posts
    (resource,) = msgspec.json.decode(body)["resourceSpans"]
    names = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
    assert names["service.name"] == {"stringValue": "headrace-render"}
    assert [span["name"] for span in spans_of(body)] == ["render"]


def test_a_collector_that_refuses_or_is_away_costs_the_spans_and_nothing_else(
    noted: list[Noted], collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.http_status = 503
    for endpoint in (collector.url, "http://127.0.0.1:1"):
        exporter = exporter_to({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        assert exporter.export(noted) is SpanExportResult.FAILURE
        exporter.shutdown()
    lost = [r for r in caplog.records if vars(r).get("action") == "spans_lost"]
    assert len(lost) == 2


def test_a_timeout_that_is_no_number_is_refused() -> None:
    env = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "soon",
    }
    with pytest.raises(SettingsError, match="TIMEOUT"):
        tracing.start("render", "render-1", env)
