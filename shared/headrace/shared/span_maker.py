"""What stages note, and the spans that are made of it: in the thread that sends them, a batch at a time.

There the code is warm, and what it makes is gone at once; on the way of a request it would be neither. Imported only
where traces are on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from headrace.shared.submission import valid_traceparent
from headrace.shared.tracing import Tracer, child_of, is_sampled

logger = logging.getLogger(__name__)

MAX_CONTEXTS = 1_024
KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "consumer": SpanKind.CONSUMER,
}
OK = Status()
FLAGS = (TraceFlags(0), TraceFlags(1))


SAMPLED: Any = SimpleNamespace(trace_flags=SimpleNamespace(sampled=True))
"""What the processor looks at: it drops what is not sampled, and only what is was noted."""


class Noted(NamedTuple):
    """A span that has ended, as `Tracer.span` was told of it."""

    name: str
    parent: str | None
    own: str | None
    start: float
    end: float
    kind: str
    attributes: Mapping[str, Any] | None
    events: Sequence[tuple[str, float]]
    link: str | None
    error: str | None

    @property
    def context(self) -> Any:
        """What the processor looks at."""
        return SAMPLED


class Later(tuple[Callable[..., None], tuple[Any, ...]]):
    """What spans are made of, as `Tracer.note` was told of it: a function, and its details.

    No named tuple, which a function in Python would make: this is made while a request is on its way.
    """

    __slots__ = ()
    context = SAMPLED


class Sampling:
    """Asks the sampler which requests have spans; not the default one, whose answer is known."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._follows = sampler is DEFAULT_ON  # all, but those whose parent is not sampled

    def takes(self, above: str | None, trace_id: str) -> bool:
        """Whether the trace is sampled, below the context `above` if there is one."""
        if self._follows:
            return above is None or is_sampled(above)
        parent, context = context_of(above), None
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(parent))
        result = self._sampler.should_sample(context, int(trace_id, 16), "request")
        return result.decision is Decision.RECORD_AND_SAMPLE


class _Collecting(Tracer):
    """Gathers the spans of a batch."""

    is_on = True

    def __init__(self, ids: IdGenerator) -> None:
        self._ids = ids
        self.spans: list[Noted] = []

    def child(self, parent: str | None) -> str | None:
        return child_of(parent, self._ids)

    def _hand_in(self, *span: Any) -> None:
        self.spans.append(Noted(*span))


def spans_of(batch: Sequence[Noted | Later], ids: IdGenerator) -> list[Noted]:
    """Return the spans of what was noted; a note of which none can be made costs no other."""
    collecting = _Collecting(ids)
    for note in batch:
        if isinstance(note, Noted):
            collecting.spans.append(note)
            continue
        make, details = note
        try:
            make(collecting, *details)
        except Exception:
            logger.exception("no span made", extra={"action": "span_failed"})
    return collecting.spans


class NotedExporter(SpanExporter):
    """Takes what was noted as it is: no OpenTelemetry span is made of it."""

    def describe(self, resource: Resource, version: str, ids: IdGenerator) -> None:
        """Say whose spans they are, before the first ones come."""
        raise NotImplementedError


class SpanMaker(SpanExporter):
    """Makes the spans of what was noted, and hands them to another exporter. Of one thread, the processor's."""

    def __init__(
        self, exporter: SpanExporter, resource: Resource, version: str, ids: IdGenerator
    ) -> None:
        self._exporter = exporter
        self._resource = HashedOnce(resource.attributes, resource.schema_url)
        self._scope = InstrumentationScope("headrace", version)
        self._ids = ids
        # The spans of a stage lie under the same one.
        self._contexts: dict[str | None, SpanContext | None] = {}

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Hand the spans on; of a broken context there is none."""
        made = [
            span for noted in spans_of(spans, self._ids) if (span := self._made(noted)) is not None
        ]
        return self._exporter.export(made) if made else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """End the other exporter."""
        self._exporter.shutdown()

    def _made(self, noted: Noted) -> ReadableSpan | None:
        above = self._read(noted.parent)
        context = self._below(above) if noted.own is None else self._read(noted.own)
        if context is None:
            return None
        linked = None if noted.link is None else self._read(noted.link)
        status, attributes = OK, noted.attributes or {}
        if noted.error is not None:
            status = Status(StatusCode.ERROR, noted.error)
            attributes = {**attributes, "error.type": noted.error}
        return ReadableSpan(
            noted.name,
            context=context,
            parent=above,
            resource=self._resource,
            attributes=attributes,
            events=[Event(what, timestamp=_ns(when)) for what, when in noted.events],
            links=() if linked is None else (Link(linked),),
            kind=KINDS[noted.kind],
            status=status,
            start_time=_ns(noted.start),
            end_time=_ns(max(noted.start, noted.end)),
            instrumentation_scope=self._scope,
        )

    def _read(self, traceparent: str | None) -> SpanContext | None:
        try:
            return self._contexts[traceparent]
        except KeyError:
            if len(self._contexts) >= MAX_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]
            return self._contexts.setdefault(traceparent, context_of(traceparent))

    def _below(self, above: SpanContext | None) -> SpanContext | None:
        if above is None:
            return None
        return SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags)


class HashedOnce(Resource):
    """The encoder groups spans by it, and a hash of it is one of all its attributes as JSON, a span each."""

    def __hash__(self) -> int:
        return id(self)


def context_of(traceparent: str | None) -> SpanContext | None:
    """Return the context that a `traceparent` names. None: none, or a broken one."""
    if traceparent is None or valid_traceparent(traceparent) is None:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, FLAGS[int(flags, 16) & 1])


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
