"""Traces, by OpenTelemetry: each stage hands in its spans when it is done, made of the times that it measured.

The standard `OTEL_*` variables say whether, where to and how many; without an exporter nothing of OpenTelemetry is
even imported. A trace context travels as a `traceparent`, once a message that starts work, never with a chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from headrace.shared.errors import SettingsError
from headrace.shared.submission import valid_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator

Kind = Literal["internal", "server", "consumer"]
Attributes = Mapping[str, Any]

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
BATCH_SIZE, QUEUE_SIZE = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "OTEL_BSP_MAX_QUEUE_SIZE"
NOTES_A_BATCH = 1_024
"""Where neither is set: a post costs as much as writing some hundred spans. The queue holds 2,048 then."""
CLOSE_TIMEOUT_S = 5.0
"""For the last spans to be sent; a collector that is away must not hold up the end of a process."""


TRACE_ID, SPAN_ID, FLAGS = 3, 36, 52
"""Where these begin in a `traceparent`; the flags with their hyphen."""
SAMPLED = frozenset("13579bdf")
"""Last digits of a `traceparent` that is sampled."""


class Tracer:
    """Makes spans of one process, or none (`OFF`). Cheap to call either way: nothing is done while it is off."""

    is_on = False

    def begin(self, parent: str | None, *, is_linked: bool = False) -> str | None:
        """Return the trace context of a span to come, a child of `parent` or the root of a new trace.

        `is_linked`: of a new trace in any case. While this is off, `parent` is passed on as it is.
        """
        return parent

    def child(self, parent: str | None) -> str | None:
        """Return the trace context of a span to come below one of headrace's own, and sampled if that is."""
        return parent

    def span(
        self,
        name: str,
        parent: str | None,
        start: float,
        end: float,
        *,
        own: str | None = None,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        events: Sequence[tuple[str, float]] = (),
        link: str | None = None,
        error: str | None = None,
    ) -> None:
        """Hand in a span that has ended; times are Unix seconds.

        `own` is what `begin` returned for it; None: nobody needed that before. `events` are names with their times,
        `link` the context of another trace, `error` a stable word. Without `parent` and `own`, and where the trace
        is not sampled, nothing happens.
        """
        if self.is_on and is_sampled(parent if own is None else own):
            self._hand_in(name, parent, own, start, end, kind, attributes, events, link, error)

    def _hand_in(self, *span: Any) -> None:
        """Take a span that is sampled, as the fields of `span_maker.Noted`."""

    def note(self, traced: str | None, make: Callable[..., None], *details: Any) -> None:
        """Have `make(tracer, *details)` hand in spans below the context `traced`, here or in another thread, later.

        Nothing is done where the trace is not sampled. The details are kept for some seconds, so no payloads.
        """
        if self.is_on and is_sampled(traced):
            make(self, *details)

    async def close(self) -> None:
        """Send what waits to be sent, for at most `CLOSE_TIMEOUT_S`."""


def is_sampled(traceparent: str | None) -> bool:
    """Whether there is a trace context, and its trace is sampled."""
    return traceparent is not None and traceparent[-1:] in SAMPLED


def child_of(parent: str | None, ids: IdGenerator) -> str | None:
    """Return the trace context of a new span below `parent`. None: that is none, or broken."""
    above = valid_traceparent(parent)
    if above is None:
        return None
    return f"{above[:SPAN_ID]}{ids.generate_span_id():016x}{above[FLAGS:]}"


OFF = Tracer()


class _Exporting(Tracer):
    """Notes what the processor's thread makes spans of (`span_maker.py`, `otlp_json.py`)."""

    is_on = True

    def __init__(self, exporter: SpanExporter, attributes: dict[str, str]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from headrace.shared import span_maker

        self._noted, self._later = span_maker.Noted, span_maker.Later
        resource = Resource.create(attributes)
        # It reads the sampler's variables, and its generator makes the IDs.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._ids = provider.id_generator
        self._sampling = span_maker.Sampling(provider.sampler)
        version = attributes["service.version"]
        if isinstance(exporter, span_maker.NotedExporter):
            exporter.describe(resource, version, self._ids)
        else:
            exporter = span_maker.SpanMaker(exporter, resource, version, self._ids)
        is_set = any(os.environ.get(name) for name in (BATCH_SIZE, QUEUE_SIZE))
        batch = None if is_set else NOTES_A_BATCH
        self._processor = BatchSpanProcessor(exporter, max_export_batch_size=batch)

    def begin(self, parent: str | None, *, is_linked: bool = False) -> str | None:
        above = None if is_linked else valid_traceparent(parent)
        if above is None:
            trace_id = f"{self._ids.generate_trace_id():032x}"
        else:
            trace_id = above[TRACE_ID : SPAN_ID - 1]
        flags = "01" if self._sampling.takes(above, trace_id) else "00"
        return f"00-{trace_id}-{self._ids.generate_span_id():016x}-{flags}"

    def child(self, parent: str | None) -> str | None:
        return child_of(parent, self._ids)

    def _hand_in(self, *span: Any) -> None:
        self._processor.on_end(self._noted(*span))  # type: ignore[arg-type]  # a span is made of it there

    def note(self, traced: str | None, make: Callable[..., None], *details: Any) -> None:
        if is_sampled(traced):
            self._processor.on_end(self._later((make, details)))  # type: ignore[arg-type]

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._processor.shutdown)


def start(role: str, instance: str, env: Mapping[str, str] | None = None) -> Tracer:
    """Return this process's tracer, as the `OTEL_*` variables say. Raises: SettingsError for a wrong one."""
    exporter = new_exporter(os.environ if env is None else env)
    if exporter is None:
        return OFF
    attributes = {"service.instance.id": instance, "service.version": _version()}
    if "OTEL_SERVICE_NAME" not in (os.environ if env is None else env):
        attributes["service.name"] = f"headrace-{role}"
    tracer = _Exporting(exporter, attributes)
    # What was imported for it stays: full collections need not look through it again and again.
    gc.collect()
    gc.freeze()
    return tracer


@contextlib.asynccontextmanager
async def running(role: str, instance: str) -> AsyncIterator[Tracer]:
    """Give this process's tracer; what waits is sent at the end. Raises: SettingsError."""
    tracer = start(role, instance)
    try:
        yield tracer
    finally:
        await tracer.close()


def new_exporter(env: Mapping[str, str]) -> SpanExporter | None:
    """Return where spans go. None: nowhere, which is the default. Raises: SettingsError."""
    default = "otlp" if any(env.get(name) for name in ENDPOINTS) else "none"
    kind = env.get(EXPORTER) or default
    if kind == "none" or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if kind != "otlp":
        raise SettingsError(f"{EXPORTER} must be otlp, console or none, got {kind!r}")
    protocol = next((env[name] for name in PROTOCOLS if env.get(name)), "http/protobuf")
    if protocol == "grpc":
        return _grpc_exporter()
    if protocol == "http/json":
        return _json_exporter(env)
    if protocol != "http/protobuf":
        raise SettingsError(
            f"{PROTOCOLS[1]} must be http/protobuf, http/json or grpc, got {protocol!r}"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _json_exporter(env: Mapping[str, str]) -> SpanExporter:
    from headrace.shared.otlp_json import OtlpJsonExporter

    try:
        return OtlpJsonExporter(env)
    except ValueError as error:
        raise SettingsError(f"OTEL_EXPORTER_OTLP_TIMEOUT: {error}") from None


def _grpc_exporter() -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{PROTOCOLS[1]}=grpc needs opentelemetry-exporter-otlp-proto-grpc, which is not installed; "
            "http/protobuf works without it"
        ) from error
    return OTLPSpanExporter()


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace's ID, as a log line names it. None: not traced."""
    return None if traceparent is None else traceparent.split("-")[1]


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+source"
