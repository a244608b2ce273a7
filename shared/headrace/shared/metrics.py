"""Every metric that headrace has of its own, and the calls by which the stages count.

A metric has vLLM's name, with `headrace` in the place of `vllm`, where vLLM measures the same of one engine. No call
here is made for a token but `ITL.observe`. docs/metrics.md is made of this module.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from headrace.shared import token_ids
from headrace.shared.messages import Handoff, PrefillTask, Prompt, Status, Terminal, Timings
from headrace.shared.subjects import Lane
from headrace.shared.tally import Tally

if TYPE_CHECKING:
    from headrace.shared.broker import Delivery

# They would be a second series for each one, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 5.0)
LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BYTES_PER_SECOND = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 2e10, 5e10, 1e11, 2e11)

# --- requests, counted by the stage that ends them ---
REQUESTS = Counter("headrace_requests", "Requests that have ended.", ["lane", "status"])
TTFT = Histogram(
    "headrace_time_to_first_token_seconds",
    "From acceptance until decode had the first token ID.",
    ["lane"],
    buckets=SECONDS,
)
TPOT = Histogram(
    "headrace_request_time_per_output_token_seconds",
    "Mean time between the token IDs of one request.",
    ["lane"],
    buckets=TOKEN_SECONDS,
)
E2E = Histogram(
    "headrace_e2e_request_latency_seconds",
    "From acceptance until the terminal was published.",
    ["lane"],
    buckets=SECONDS,
)
STAGE = Histogram(
    "headrace_request_stage_seconds",
    "What each stage, and each wait before one, took of a request; `derender` is CPU time.",
    ["lane", "stage"],
    buckets=SECONDS,
)
PROMPT_TOKENS = Counter("headrace_prompt_tokens", "Token IDs of prompts.", ["lane"])
GENERATION_TOKENS = Counter("headrace_generation_tokens", "Token IDs of answers.", ["lane"])
GOODPUT = Counter(
    "headrace_goodput_requests",
    "Requests that ended well and met every objective (`metrics.slo_ttft_s`, `metrics.slo_tpot_s`).",
    ["lane"],
)
SLO_MISSED = Counter(
    "headrace_slo_missed_requests",
    "Requests that did not, by each objective missed: ttft, tpot, or failed. Cancelled ones count nowhere.",
    ["lane", "objective"],
)

# --- queues ---
QUEUE_TIME = Histogram(
    "headrace_request_queue_time_seconds",
    "How long a message waited in a queue (req, job, pf) until its first taker had it.",
    ["queue", "lane"],
    buckets=SECONDS,
)
REDELIVERIES = Counter(
    "headrace_redeliveries", "Messages of a queue that were taken a second time or more.", ["queue"]
)
PREEMPTED = Counter("headrace_preempted_jobs", "Bulk jobs that decode gave back for an urgent one.")
DEAD_LETTERS = Counter("headrace_dead_letters", "Messages that were put aside.", ["queue"])
QUEUE_DEPTH = Gauge(
    "headrace_queue_depth", "Messages that wait, by the gateway.", ["queue", "model", "lane"]
)
QUEUE_TAKEN = Gauge(
    "headrace_queue_taken",
    "Messages that are taken and not settled, by the gateway.",
    ["queue", "model", "lane"],
)
QUEUE_AGE = Gauge(
    "headrace_queue_oldest_seconds",
    "Age of the oldest message that waits; 0: none waits. Missing: no worker is there that takes from it, and tells.",
    ["queue", "model", "lane"],
)

# --- gateway ---
HTTP_REQUESTS = Counter(
    "headrace_http_requests",
    "Calls that generate, by what they were answered; 0: the client left first.",
    ["endpoint", "code"],
)
HTTP_REFUSED = Counter(
    "headrace_http_refused_requests",
    "Calls of any route that were refused: no good key, bad ones, full queues, no worker, nothing of that name.",
    ["code", "error"],
)
HTTP_FIRST_BYTE = Histogram(
    "headrace_http_time_to_first_byte_seconds",
    "From acceptance until the first part of the answer was there.",
    ["endpoint"],
    buckets=SECONDS,
)
HTTP_SECONDS = Histogram(
    "headrace_http_request_seconds",
    "From acceptance until the client was answered.",
    ["endpoint"],
    buckets=SECONDS,
)

# --- render ---
RENDER_CACHE_QUERIES = Counter(
    "headrace_render_cache_queries", "Token IDs of prompts that render looked for in its cache."
)
RENDER_CACHE_HITS = Counter(
    "headrace_render_cache_hits", "Those that it found there, and did not compute again."
)

# --- prefill, handoffs and the KV cache ---
LOCAL_PREFILLS = Counter(
    "headrace_local_prefills",
    "Prompts that decode computed itself: `short` (or cached), `no_worker`, `last_attempt`, or `colocated`.",
    ["reason"],
)
REMOTE_PREFILLS = Counter("headrace_remote_prefills", "Prompts whose handoff reached decode.")
PREFILL_TIME = Histogram(
    "headrace_request_prefill_time_seconds",
    "The forward pass of one prompt, by prefill.",
    buckets=SECONDS,
)
PREFILL_TOKENS = Counter("headrace_prefill_tokens", "Token IDs of prompts that prefill computed.")
PREFILL_WASTED = Counter(
    "headrace_prefill_wasted_tokens",
    "Those of prompts whose KV cache nobody pulled: `unwanted` (by prefill), `not_pulled` (by decode).",
    ["reason"],
)
RETRIES = Counter(
    "headrace_retries",
    "Further attempts at a prompt, by what failed before: `prefill`, `pull` or `engine`.",
    ["after"],
)
HANDOFFS_ISSUED = Counter("headrace_handoffs_issued", "Handoffs that prefill made.")
HANDOFFS_USED = Counter("headrace_handoffs_used", "Handoffs whose KV cache decode has pulled.")
HANDOFFS_REFUSED = Counter(
    "headrace_handoffs_refused", "Handoffs that decode did not let to its engine.", ["reason"]
)
HANDOFFS_ORPHANED = Counter(
    "headrace_handoffs_orphaned",
    "Handoffs for which nobody waited any more; decode gives them back.",
)
KV_SECONDS = Histogram(
    "headrace_kv_transfer_seconds",
    "The pull of one request: `post`, until the read is posted; `wire`, until NIXL says that all is there; "
    "`notice`, until the first token ID, decode's own step in it.",
    ["part"],
    buckets=SECONDS,
)
KV_BYTES = Counter("headrace_kv_transfer_bytes", "Bytes that decode has pulled.")
KV_SPEED = Histogram(
    "headrace_kv_transfer_bytes_per_second", "Speed of one pull.", buckets=BYTES_PER_SECOND
)
ITL = Tally(
    "headrace_inter_token_latency_seconds",
    "Between two outputs of the engine for one choice, by decode.",
    buckets=TOKEN_SECONDS,
)

# --- cancels ---
CANCELS_ASKED = Counter(
    "headrace_cancels_asked", "Requests for which a cancel was published, by whom.", ["by"]
)
CANCELS_EFFECTIVE = Counter(
    "headrace_cancels_effective",
    "Requests, or prefill tasks, that a cancel has ended, where.",
    ["stage"],
)

# --- derender, and every process ---
DERENDER_CPU = Counter("headrace_derender_cpu_seconds", "CPU time of detokenizing and parsing.")
DERENDER_TOKENS = Counter("headrace_derender_tokens", "Token IDs that it was spent on.")
LOOP_LAG = Histogram(
    "headrace_event_loop_lag_seconds",
    "How much later than asked for the event loop ran a timer; sampled.",
    buckets=LAG_SECONDS,
)
SLOW_CONSUMER = Counter(
    "headrace_slow_consumer_messages", "Messages dropped because this process was too slow."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """What a request must meet to count as good, in seconds."""

    ttft_s: float
    tpot_s: float


NO_SLO = Slo(ttft_s=math.inf, tpot_s=math.inf)
"""Every request that ends well is good."""


def request_ended(lane: Lane, terminal: Terminal, slo: Slo) -> None:
    """A terminal was published, and is the request's first."""
    REQUESTS.labels(lane, terminal.status).inc()
    timings = terminal.timings
    tpot_s = tpot_of(timings)
    for stage, seconds in stages_of(timings).items():
        STAGE.labels(lane, stage).observe(seconds)
    if timings.first_token_s is not None:
        TTFT.labels(lane).observe(timings.first_token_s)
    if tpot_s is not None:
        TPOT.labels(lane).observe(tpot_s)
    if timings.total_s is not None:
        E2E.labels(lane).observe(timings.total_s)
    PROMPT_TOKENS.labels(lane).inc(timings.num_prompt_token_ids or 0)
    GENERATION_TOKENS.labels(lane).inc(timings.num_output_token_ids or 0)
    if terminal.status == "cancelled":
        return
    missed = {
        "failed": terminal.status != "ok",
        "ttft": (timings.first_token_s or 0.0) > slo.ttft_s,
        "tpot": (tpot_s or 0.0) > slo.tpot_s,
    }
    if not any(missed.values()):
        GOODPUT.labels(lane).inc()
    for objective in (objective for objective, is_missed in missed.items() if is_missed):
        SLO_MISSED.labels(lane, objective).inc()


def tpot_of(timings: Timings) -> float | None:
    """Return the mean time between token IDs (seconds). None: fewer than two, or not measured."""
    num, seconds = timings.num_output_token_ids, timings.decode_s
    return None if num is None or num < 2 or seconds is None else seconds / (num - 1)


def stages_of(timings: Timings) -> dict[str, float]:
    """Return what is known of where the time went (seconds), by stage."""
    known = {
        "render_queue": timings.render_queue_s,
        "render": timings.render_s,
        "decode_queue": timings.decode_queue_s,
        "prefill_queue": timings.prefill_queue_s,
        "prefill": timings.prefill_s,
        "kv_transfer": timings.kv_transfer_s,
        "decode": timings.decode_s,
        "derender": timings.derender_s,
    }
    return {stage: seconds for stage, seconds in known.items() if seconds is not None}


def taken(delivery: Delivery) -> None:
    """A message was taken from its queue."""
    queue, lane = queue_of(delivery.subject)
    if delivery.num_delivered > 1:
        REDELIVERIES.labels(queue).inc()
    else:
        QUEUE_TIME.labels(queue, lane).observe(max(0.0, time.time() - delivery.published))


def queue_of(subject: str) -> tuple[str, str]:
    """Return the queue of a work queue's subject, and the lane; `own` where it is for one worker alone."""
    tokens = subject.split(".")
    return tokens[2], tokens[-1] if tokens[-1] in _LANES else "own"


_LANES = frozenset(Lane)


def prefilled(task: PrefillTask, handoff: Handoff) -> None:
    """Prefill has made a handoff."""
    HANDOFFS_ISSUED.inc()
    PREFILL_TIME.observe(handoff.prefill_s)
    PREFILL_TOKENS.inc(token_ids.count(task.token_ids) - handoff.num_cached_token_ids)


def pulled(parts: dict[str, float], num_bytes: int | None) -> None:
    """Decode has pulled the KV cache of one prompt, `parts` of seconds; None: how much of it, nobody knows."""
    for part, seconds in parts.items():
        KV_SECONDS.labels(part).observe(seconds)
    if num_bytes is None:
        return
    KV_BYTES.inc(num_bytes)
    moving_s = parts["post"] + parts["wire"]
    if moving_s > 0:
        KV_SPEED.observe(num_bytes / moving_s)


def not_pulled(prompt: Prompt) -> None:
    """Decode has a handoff, and will not pull it."""
    PREFILL_WASTED.labels("not_pulled").inc(token_ids.count(prompt.token_ids))


def answered(
    endpoint: str, http_status: int | None, total_s: float, first_byte_s: float | None
) -> None:
    """The gateway is done with a call; None: its client left before anything was sent, or nothing came."""
    HTTP_REQUESTS.labels(endpoint, http_status or 0).inc()
    HTTP_SECONDS.labels(endpoint).observe(total_s)
    if first_byte_s is not None:
        HTTP_FIRST_BYTE.labels(endpoint).observe(first_byte_s)


def derendered(timings: Timings) -> None:
    """Derender has ended an answer."""
    DERENDER_CPU.inc(timings.derender_s or 0.0)
    DERENDER_TOKENS.inc(timings.num_output_token_ids or 0)


def _begin_at_zero() -> None:
    """Show what can happen before it does: Prometheus sees no increase in a series that begins with 1."""
    for queue in ("req", "job", "pf"):
        REDELIVERIES.labels(queue)
        DEAD_LETTERS.labels(queue)
    for lane in Lane:
        GOODPUT.labels(lane)
        for status in get_args(Status):
            REQUESTS.labels(lane, status)
        for objective in ("ttft", "tpot", "failed"):
            SLO_MISSED.labels(lane, objective)
    for reason in ("task", "contract", "prompt", "epoch", "expired", "repeated", "unknown_task"):
        HANDOFFS_REFUSED.labels(reason)
    for reason in ("unwanted", "not_pulled"):
        PREFILL_WASTED.labels(reason)


_begin_at_zero()
