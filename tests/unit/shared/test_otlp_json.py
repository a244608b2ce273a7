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
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.shared import tracing
from headrace.shared.errors import SettingsError
from headrace.shared.otlp_json import OtlpJsonExporter, request_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LINK = "00-5bf92f3577b34da6a3ce929d0e0e4736-01f067aa0ba902b7-01"


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
async def spans(monkeypatch: pytest.MonkeyPatch) -> tuple[ReadableSpan, ...]:
    """Spans of all sorts, as a process hands them in."""
    kept = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "new_exporter", lambda env: kept)
    tracer = tracing.start("decode", "decode-1", {})
    attributes: dict[str, Any] = {"a": "text", "b": True, "c": -(2**40), "d": 0.25, "e": ["x", "y"]}
    own = tracer.begin(PARENT)
    tracer.span("chat m", None, 1.5, 2.5, own=tracer.begin(None), kind="server", link=LINK)
    tracer.span(
        "decode",
        PARENT,
        1.0,
        3.0,
        own=own,
        kind="consumer",
        attributes=attributes,
        events=[("first token", 2.0)],
        error="engine",
    )
    await tracer.close()
    return kept.get_finished_spans()


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


def test_the_json_says_what_the_librarys_protobuf_says(spans: tuple[ReadableSpan, ...]) -> None:
    as_json = msgspec.json.decode(msgspec.json.encode(request_of(spans)))
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
    assert stripped(read) == stripped(encode_spans(spans))


def test_spans_are_posted_where_and_how_the_variables_say(
    spans: tuple[ReadableSpan, ...], collector: Collector
) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.url}/",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-token=a%20b",
    }
    exporter = OtlpJsonExporter(env)
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    own = OtlpJsonExporter({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/x"})
    assert own.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    own.shutdown()
    assert [path for path, _, _ in collector.posts] == ["/v1/traces", "/x"]
    headers = collector.posts[0][1]
    assert (headers["x-token"], headers["Content-Type"]) == ("a b", "application/json")


def test_a_collector_that_refuses_or_is_away_costs_the_spans_and_nothing_else(
    spans: tuple[ReadableSpan, ...], collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.http_status = 503
    for endpoint in (collector.url, "http://127.0.0.1:1"):
        exporter = OtlpJsonExporter({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        assert exporter.export(spans) is SpanExportResult.FAILURE
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
