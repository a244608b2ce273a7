"""Spans to a collector as OTLP in JSON, written straight from what stages have noted: no span object between (ADR 14).

Imported only where `OTEL_EXPORTER_OTLP_PROTOCOL` is `http/json`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring as quoted
from math import isfinite
from typing import Any

import httpx
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.util.re import parse_env_headers

from headrace.shared.span_maker import MAX_CONTEXTS, Later, Noted, NotedExporter, spans_of
from headrace.shared.submission import valid_traceparent

logger = logging.getLogger(__name__)

PATH = "/v1/traces"
DEFAULT_ENDPOINT = "http://localhost:4318"
DEFAULT_TIMEOUT_S = 10.0
KEEPALIVE_S = 30.0
"""Longer than the pause between two batches (5 s), so that no batch has to connect anew."""
KINDS = {"internal": 1, "server": 2, "consumer": 5}
_ERROR = 2  # STATUS_CODE_ERROR


class OtlpJsonExporter(NotedExporter):
    """Posts batches of spans. One that a collector does not take is lost; a line in the log says so."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Read the endpoint, headers and timeout from the standard variables. Raises: ValueError."""
        endpoint = _of_traces(env, "ENDPOINT")
        if "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" not in env:
            endpoint = (endpoint or DEFAULT_ENDPOINT).rstrip("/") + PATH
        self._url = endpoint
        headers = parse_env_headers(_of_traces(env, "HEADERS"), liberal=True)
        self._client = httpx.Client(
            headers={**headers, "Content-Type": "application/json"},
            timeout=float(_of_traces(env, "TIMEOUT") or DEFAULT_TIMEOUT_S),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    def describe(self, resource: Resource, version: str, ids: IdGenerator) -> None:
        """Say whose spans they are, before the first ones come."""
        self._writer = Writer(resource, version, ids)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send spans; called from the processor's own thread."""
        body = self._writer.request_of(spans)
        if not body:
            return SpanExportResult.SUCCESS
        try:
            self._client.post(self._url, content=body).raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("%d spans lost: %s", len(spans), error, extra={"action": "spans_lost"})
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the connection."""
        self._client.close()


def _of_traces(env: Mapping[str, str], name: str) -> str:
    """Return a variable of traces, or else of all signals."""
    return env.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or env.get(f"OTEL_EXPORTER_OTLP_{name}", "")


class Writer:
    """Writes requests of one process, and so of one resource and scope."""

    def __init__(self, resource: Resource, version: str, ids: IdGenerator) -> None:
        self._head = (
            f'{{"resourceSpans":[{{"resource":{{"attributes":[{_attributes(resource.attributes)}]}},'
            f'"scopeSpans":[{{"scope":{{"name":"headrace","version":{quoted(version)}}},"spans":['
        )
        self._ids = ids
        # The spans of a stage lie under the same one.
        self._contexts: dict[str | None, tuple[str, str] | None] = {}

    def request_of(self, batch: Sequence[Noted | Later]) -> bytes:
        """Return an `ExportTraceServiceRequest`; empty where no span has a context that can be read."""
        written = [text for noted in spans_of(batch, self._ids) if (text := self._span(noted))]
        if not written:
            return b""
        # A lone surrogate, which a client's JSON may hold, is not worth the whole batch.
        return f"{self._head}{','.join(written)}]}}]}}]}}".encode(errors="replace")

    def _span(self, noted: Noted) -> str:
        above = self._read(noted.parent)
        if noted.own is not None:
            context = self._read(noted.own)
        elif above is not None:
            context = above[0], f"{self._ids.generate_span_id():016x}"
        else:
            context = None
        if context is None:
            return ""
        start = int(noted.start * 1e9)
        parts = [
            f'{{"traceId":"{context[0]}","spanId":"{context[1]}",'
            f'"name":{quoted(noted.name)},"kind":{KINDS[noted.kind]},"startTimeUnixNano":"{start}",'
            f'"endTimeUnixNano":"{max(start, int(noted.end * 1e9))}","attributes":['
            f"{_attributes(noted.attributes or {})}"
        ]
        if noted.error is not None:
            comma = "," if noted.attributes else ""
            parts.append(f"{comma}{_attributes({'error.type': noted.error})}")
        parts.append("]")
        if above is not None:
            parts.append(f',"parentSpanId":"{above[1]}"')
        if noted.events:
            events = [
                f'{{"name":{quoted(what)},"timeUnixNano":"{int(when * 1e9)}"}}'
                for what, when in noted.events
            ]
            parts.append(f',"events":[{",".join(events)}]')
        if (linked := None if noted.link is None else self._read(noted.link)) is not None:
            parts.append(f',"links":[{{"traceId":"{linked[0]}","spanId":"{linked[1]}"}}]')
        if noted.error is not None:
            parts.append(f',"status":{{"code":{_ERROR},"message":{quoted(noted.error)}}}')
        parts.append("}")
        return "".join(parts)

    def _read(self, traceparent: str | None) -> tuple[str, str] | None:
        """Return the IDs of a trace and a span. None: there are none, or broken ones."""
        try:
            return self._contexts[traceparent]
        except KeyError:
            if len(self._contexts) >= MAX_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]
            return self._contexts.setdefault(traceparent, _ids_of(traceparent))


def _ids_of(traceparent: str | None) -> tuple[str, str] | None:
    if traceparent is None or valid_traceparent(traceparent) is None:
        return None
    _, trace_id, span_id, _ = traceparent.split("-")
    return trace_id, span_id


def _attributes(attributes: Mapping[str, Any]) -> str:
    written = []
    for key, value in attributes.items():
        head = _HEADS.get(key) or _head(key)
        if type(value) is str:  # most are
            written.append(f'{head}{{"stringValue":{quoted(value)}}}}}')
        else:
            written.append(f"{head}{_value(value)}}}")
    return ",".join(written)


def _head(key: str) -> str:
    return _HEADS.setdefault(key, f'{{"key":{quoted(key)},"value":')


_HEADS: dict[str, str] = {}
"""How an attribute begins. Keys are the code's own, so there are not many."""


def _value(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return f'{{"stringValue":{quoted(value)}}}'
    if kind is int:
        return f'{{"intValue":"{value}"}}'
    if kind is float:  # as JSON it has no NaN; one would cost the whole batch
        return f'{{"doubleValue":{value}}}' if isfinite(value) else '{"doubleValue":"NaN"}'
    if kind is bool:
        return '{"boolValue":true}' if value else '{"boolValue":false}'
    if isinstance(value, str):
        return f'{{"stringValue":{quoted(str(value))}}}'
    return f'{{"arrayValue":{{"values":[{",".join([_value(one) for one in value])}]}}}}'
