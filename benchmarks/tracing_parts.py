"""What the parts of tracing cost a request, in CPU time of this process: `python benchmarks/tracing_parts.py`.

A request's ten spans are noted by the functions that the stages call, encoded in batches as the processor hands them
over, and posted to a server in another process. `http/json` is written straight from what was noted; for any other
protocol OpenTelemetry's spans are made first. Printed is the least of several rounds: what others use of the
machine makes a round dearer, never cheaper.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import mock

import httpx
import msgspec
import requests
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.shared import spans, tracing, wire
from headrace.shared.messages import Handoff, Job, PrefillTask, Terminal
from headrace.shared.otlp_json import Writer
from headrace.shared.submission import Submission
from headrace.shared.wire import Message

ROUNDS = 15
NOTES = 7  # of a request: three of decode, one of each other stage
NUM_REQUESTS = 146  # 1,022 notes: the processor's batches have 1,024
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "unit" / "golden"
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
M = TypeVar("M", bound=Message)


def golden(tag: str, kind: type[M]) -> M:
    """Return the example of a message."""
    return wire.decode((GOLDEN / f"{tag}.msgpack").read_bytes(), kind)


JOB, TASK = golden("job.v1", Job), golden("prefill.v1", PrefillTask)
HANDOFF, TIMINGS = golden("handoff.v1", Handoff), golden("terminal.v1", Terminal).timings
SUBMISSION = Submission(
    request_id=JOB.request_id,
    tenant=JOB.tenant,
    slug=JOB.model,
    lane=JOB.lane,
    endpoint=JOB.endpoint,
    deadline=JOB.deadline,
    accepted=JOB.published,
    body=JOB.body,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)


class Sink(InMemorySpanExporter):
    """Keeps the last batch of spans that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: Sequence[ReadableSpan] = ()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keep spans."""
        self.batch = spans
        return SpanExportResult.SUCCESS


def one_request(tracer: tracing.Tracer) -> None:
    """Hand in the spans of one request with a remote prefill, as its stages together do."""
    now = JOB.published
    own = tracer.begin(None)
    job = msgspec.structs.replace(JOB, traceparent=own)
    traceparent, of_render = spans.begin_render(tracer, SUBMISSION)
    spans.rendered(tracer, SUBMISSION, of_render, taken=now, end=now, timings=TIMINGS)
    spans.taken(tracer, job, now, 1)
    task = msgspec.structs.replace(TASK, traceparent=tracer.child(traceparent))
    spans.prefilled(tracer, task, HANDOFF, now)
    spans.waited_for_prefill(tracer, job, task, now, None)
    spans.decoded(tracer, job, TIMINGS, start=now, first=now, last=now, num_descriptors=48)
    spans.derendered(tracer, job, TIMINGS, start=now, end=now, error=None)
    spans.answered(
        tracer,
        own,
        None,
        request_id=job.request_id,
        model=job.model,
        endpoint=job.endpoint,
        stream=True,
        start=now,
        end=now,
        first_byte_s=0.1,
        http_status=200,
        status="ok",
    )


def cost_ms(work: Callable[[], object], *, times: int, a_call: int) -> float:
    """Return the CPU time (ms) of one of the `a_call` things that a call does: the least of all rounds."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - begun) / times / a_call * 1e3)
    return round(min(rounds), 4)


@contextmanager
def server() -> Iterator[str]:
    """Give the address of a server that takes posts."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1/traces"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure and print."""
    sink = Sink()
    with mock.patch.object(tracing, "new_exporter", return_value=sink):
        tracer = tracing.start("benchmark", "benchmark-1", {})
    processor, noted = tracer._processor, []  # type: ignore[attr-defined]  # between its two sides
    with mock.patch.object(processor, "on_end", noted.append):
        noting = cost_ms(lambda: one_request(tracer), times=NUM_REQUESTS, a_call=1)
    batch = noted[: NUM_REQUESTS * NOTES]
    maker = processor.span_exporter
    making = cost_ms(lambda: maker.export(batch), times=5, a_call=NUM_REQUESTS)
    batch, num = sink.batch, NUM_REQUESTS
    writer = Writer(batch[0].resource, "0.1", tracer._ids)  # type: ignore[attr-defined]  # as above
    as_json = writer.request_of(noted[: NUM_REQUESTS * NOTES])
    as_protobuf = encode_spans(batch).SerializeToString()
    with server() as url, httpx.Client() as client, requests.Session() as session:
        found = {
            "python": platform.python_version(),
            "ms a request: noting spans": noting,
            "ms a request: http/json, encoding": cost_ms(
                lambda: writer.request_of(noted[: NUM_REQUESTS * NOTES]), times=5, a_call=num
            ),
            "ms a request: http/protobuf, making spans": making,
            "ms a request: http/protobuf, encoding": cost_ms(
                lambda: encode_spans(batch).SerializeToString(), times=5, a_call=num
            ),
            "ms a post: http/json": cost_ms(
                lambda: client.post(url, content=as_json), times=5, a_call=1
            ),
            "ms a post: http/protobuf": cost_ms(
                lambda: session.post(url, data=as_protobuf), times=5, a_call=1
            ),
            "bytes a request": [round(len(as_json) / num), round(len(as_protobuf) / num)],
        }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
