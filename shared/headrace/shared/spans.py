"""The spans of a request, and their names: one function a stage, called when the stage is done with it.

It notes what its spans need; the function below it makes them, in the processor's thread. All are made of the times
that also stand in `Timings`. Under the request's own span lie, in this order, `queue` and `render`, `queue` and
`prefill.wait` (in it `queue` and `prefill`), `decode` (in it `kv.transfer`), and beside `decode`, but for its end,
`derender`. Attributes have OpenTelemetry's names where it has one; a request's ID stands in the gateway's span and in
render's, as each attribute costs 3 µs to send.
"""

from __future__ import annotations

from typing import Any

from headrace.shared import token_ids
from headrace.shared.messages import Endpoint, Handoff, Job, PrefillFailed, PrefillTask, Timings
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission
from headrace.shared.tracing import Tracer

QUEUE = "queue"
RENDER = "render"
PREFILL_WAIT = "prefill.wait"
PREFILL = "prefill"
KV_TRANSFER = "kv.transfer"
DECODE = "decode"
DERENDER = "derender"
BATCH = "batch"
FIRST_TOKEN = "first token"

# OpenTelemetry's semantic conventions; a test holds these to the words of its package
ERROR_TYPE = "error.type"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_TEMPLATE = "messaging.destination.template"
MESSAGING_OPERATION = "messaging.operation.name"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
STREAM = "gen_ai.request.stream"
NUM_CHOICES = "gen_ai.request.choice.count"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
# headrace's own
REQUEST_ID = "headrace.request_id"
LANE = "headrace.lane"
STATUS = "headrace.status"
PREFILL_MODE = "headrace.prefill_mode"
NUM_DELIVERED = "headrace.num_delivered"
BATCH_ID = "headrace.batch_id"
NUM_LINES = "headrace.num_lines"
CPU_S = "headrace.cpu_s"
KV_BYTES = "headrace.kv_transfer.bytes"
KV_MS = "headrace.kv_transfer.ms"
KV_PART_MS = "headrace.kv_transfer.ms."  # post, wire or notice behind it
KV_DESCRIPTORS = "headrace.kv_transfer.descriptors"

OPERATIONS: dict[Endpoint, str] = {
    "chat.completions": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "generate": "text_completion",
}


def answered(
    tracer: Tracer,
    own: str | None,
    parent: str | None,
    *,
    request_id: str,
    model: str,
    endpoint: Endpoint,
    stream: bool,
    start: float,
    end: float,
    first_byte_s: float | None,
    http_status: int | None,
    status: str,
) -> None:
    """Gateway: the whole request, as its client saw it."""
    if tracer.is_on:
        what = (request_id, model, endpoint, stream, http_status, status)
        tracer.note(own or parent, _answered, own, parent, what, start, end, first_byte_s)


def _answered(
    tracer: Tracer,
    own: str | None,
    parent: str | None,
    what: tuple[str, str, Endpoint, bool, int | None, str],
    start: float,
    end: float,
    first_byte_s: float | None,
) -> None:
    request_id, model, endpoint, stream, http_status, status = what
    attributes: dict[str, Any] = {
        REQUEST_ID: request_id,
        OPERATION: OPERATIONS[endpoint],
        PROVIDER: "headrace",
        MODEL: model,
        STREAM: stream,
        STATUS: status,
    }
    if http_status is not None:
        attributes[HTTP_STATUS] = http_status
    if first_byte_s is not None and stream:
        attributes[FIRST_CHUNK] = first_byte_s
    tracer.span(
        f"{OPERATIONS[endpoint]} {model}",
        parent,
        start,
        end,
        own=own,
        kind="server",
        attributes=attributes,
        error=status if status in ("error", "expired") else None,
    )


def begin_render(tracer: Tracer, submission: Submission) -> tuple[str | None, str | None]:
    """Return the context that the request's spans lie under, and render's own where it is the first one.

    A request without a trace begins one with render's span. So does a line of a batch (`bulk`): its submission
    names the trace of the batch, to which thousands of lines are linked instead of lying in it.
    """
    above = submission.traceparent
    if not tracer.is_on or (above is not None and submission.lane is not Lane.BULK):
        return above, None
    own = tracer.begin(above, is_linked=True)
    return own, own


def rendered(
    tracer: Tracer,
    submission: Submission,
    own: str | None,
    *,
    taken: float,
    end: float,
    timings: Timings | None = None,
    error: str | None = None,
) -> None:
    """Render: the wait for it, and its work until the job, or the request's end, is published."""
    if not tracer.is_on:
        return
    above = submission.traceparent
    what = (submission.request_id, str(submission.lane))
    num = None if timings is None else timings.num_prompt_token_ids
    times = (submission.accepted, taken, end)
    tracer.note(own or above, _rendered, own, above, what, times, num, error)


def _rendered(
    tracer: Tracer,
    own: str | None,
    above: str | None,
    what: tuple[str, str],
    times: tuple[float, float, float],
    num_prompt_token_ids: int | None,
    error: str | None,
) -> None:
    accepted, taken, end = times
    _queued(tracer, own or above, "hr.v1.req.<tenant>.<model>.<lane>", accepted, taken)
    attributes: dict[str, Any] = {REQUEST_ID: what[0], LANE: what[1]}
    if num_prompt_token_ids is not None:
        attributes[INPUT_TOKENS] = num_prompt_token_ids
    tracer.span(
        RENDER,
        None if own else above,
        taken,
        end,
        own=own,
        attributes=attributes,
        link=above if own is not None else None,
        error=error,
    )


def waited_for_prefill(
    tracer: Tracer, job: Job, task: PrefillTask, end: float, error: str | None
) -> None:
    """Decode: from a prefill task's publication until its handoff is here, or is not expected any more."""
    if tracer.is_on:
        above, own = job.traceparent, task.traceparent
        tracer.note(own or above, _waited_for_prefill, above, own, task.published, end, error)


def _waited_for_prefill(
    tracer: Tracer,
    above: str | None,
    own: str | None,
    start: float,
    end: float,
    error: str | None,
) -> None:
    tracer.span(PREFILL_WAIT, above, start, end, own=own, error=error)


def prefilled(
    tracer: Tracer, task: PrefillTask, answer: Handoff | PrefillFailed, end: float
) -> None:
    """Prefill: the wait of a task, and the prompt's forward pass."""
    above = task.traceparent
    if not tracer.is_on:
        return
    if isinstance(answer, PrefillFailed):
        tracer.note(above, _not_prefilled, above, end, answer.failure.code)
        return
    taken = end - answer.prefill_s
    times = (taken - answer.prefill_queue_s, taken, end)
    num = token_ids.count(task.token_ids)
    tracer.note(above, _prefilled, above, times, num, answer.num_cached_token_ids)


def _not_prefilled(tracer: Tracer, above: str | None, end: float, error: str) -> None:
    tracer.span(PREFILL, above, end, end, error=error)


def _prefilled(
    tracer: Tracer,
    above: str | None,
    times: tuple[float, float, float],
    num_token_ids: int,
    num_cached_token_ids: int,
) -> None:
    queued, taken, end = times
    _queued(tracer, above, "hr.v1.pf.<pool>.<lane>", queued, taken)
    attributes = {INPUT_TOKENS: num_token_ids, CACHED_TOKENS: num_cached_token_ids}
    tracer.span(PREFILL, above, taken, end, attributes=attributes)


def taken(tracer: Tracer, job: Job, when: float, num_delivered: int) -> None:
    """Decode: the wait of a job, as soon as it is taken."""
    if tracer.is_on:
        above = job.traceparent
        tracer.note(above, _taken, above, job.published, when, num_delivered)


def _taken(
    tracer: Tracer, above: str | None, published: float, when: float, num_delivered: int
) -> None:
    more = {NUM_DELIVERED: num_delivered}
    _queued(tracer, above, "hr.v1.job.<pool>.<tenant>.<lane>", published, when, more)


def decoded(
    tracer: Tracer,
    job: Job,
    timings: Timings,
    *,
    start: float,
    first: float | None,
    last: float,
    num_descriptors: int | None = None,
    kv_parts: dict[str, float] | None = None,
    error: str | None = None,
) -> None:
    """Decode: from when the prompt's KV cache can be had (`start`) to the last token ID."""
    if tracer.is_on:
        above = job.traceparent
        what = (job.endpoint, job.model, job.n)
        moved = (num_descriptors, kv_parts or {})
        tracer.note(above, _decoded, above, what, timings, (start, first, last), moved, error)


def _decoded(
    tracer: Tracer,
    above: str | None,
    what: tuple[Endpoint, str, int],
    timings: Timings,
    times: tuple[float, float | None, float],
    moved: tuple[int | None, dict[str, float]],
    error: str | None,
) -> None:
    endpoint, model, num_choices = what
    start, first, last = times
    own = None
    if timings.kv_transfer_s is not None:
        own = tracer.child(above)
        num_descriptors, parts = moved
        of_kv: dict[str, Any] = {
            KV_BYTES: timings.kv_transfer_bytes,
            KV_MS: timings.kv_transfer_s * 1e3,
        }
        if num_descriptors is not None:
            of_kv[KV_DESCRIPTORS] = num_descriptors
        for part, seconds in parts.items():
            of_kv[KV_PART_MS + part] = seconds * 1e3
        tracer.span(KV_TRANSFER, own, start, start + timings.kv_transfer_s, attributes=of_kv)
    tracer.span(
        DECODE,
        above,
        start,
        last,
        own=own,
        attributes={
            OPERATION: OPERATIONS[endpoint],
            MODEL: model,
            NUM_CHOICES: num_choices,
            INPUT_TOKENS: timings.num_prompt_token_ids or 0,
            CACHED_TOKENS: timings.num_cached_token_ids or 0,
            OUTPUT_TOKENS: timings.num_output_token_ids or 0,
            PREFILL_MODE: timings.prefill_mode or "none",
        },
        events=() if first is None else ((FIRST_TOKEN, first),),
        error=error,
    )


def derendered(
    tracer: Tracer, job: Job, timings: Timings, *, start: float, end: float, error: str | None
) -> None:
    """Derender: from the claim until the terminal is published."""
    if tracer.is_on:
        above = job.traceparent
        tracer.note(above, _derendered, above, timings.derender_s or 0.0, start, end, error)


def _derendered(
    tracer: Tracer,
    above: str | None,
    cpu_s: float,
    start: float,
    end: float,
    error: str | None,
) -> None:
    tracer.span(DERENDER, above, start, end, attributes={CPU_S: cpu_s}, error=error)


def batch_ran(
    tracer: Tracer, own: str | None, *, batch_id: str, num_lines: int, start: float, end: float
) -> None:
    """Batch: one owner's time with a batch; its lines are traces of their own, linked to this one."""
    if tracer.is_on:
        attributes = {BATCH_ID: batch_id, NUM_LINES: num_lines}
        tracer.span(BATCH, None, start, end, own=own, attributes=attributes)


def _queued(
    tracer: Tracer,
    parent: str | None,
    template: str,
    start: float,
    end: float,
    more: dict[str, Any] | None = None,
) -> None:
    attributes = {
        MESSAGING_SYSTEM: "nats",
        MESSAGING_TEMPLATE: template,
        MESSAGING_OPERATION: "take",
        **(more or {}),
    }
    tracer.span(QUEUE, parent, start, end, kind="consumer", attributes=attributes)
