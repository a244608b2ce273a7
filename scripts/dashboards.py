"""Writes the Grafana dashboards of deploy/observability, from the queries below.

.venv/bin/python scripts/dashboards.py            # the files
.venv/bin/python scripts/dashboards.py --check    # say whether they are up to date; change nothing
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "grafana" / "dashboards"
WIDTH, HEIGHT = 8, 7  # of a panel, in Grafana's grid of 24 columns
RATE = "$__rate_interval"


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One graph: queries with their legends."""

    title: str
    what: str  #: what it tells, for the panel's "i"
    queries: dict[str, str]  #: legend → PromQL
    unit: str = "short"
    is_stacked: bool = False


def quantiles(
    metric: str, where: str = "", by: str = "", *, of: tuple[float, ...]
) -> dict[str, str]:
    """Return the quantiles of a histogram, one query each."""
    labels = f"le, {by}" if by else "le"
    name = f" {{{{{by}}}}}" if by else ""
    rate = f"sum by ({labels}) (rate({metric}_bucket{{{where}}}[{RATE}]))"
    return {f"p{q * 100:g}{name}": f"histogram_quantile({q:g}, {rate})" for q in of}


def mean(metric: str, by: str = "") -> str:
    """Return the mean of a histogram."""
    sums, counts = (f"sum by ({by}) (rate({metric}_{part}[{RATE}]))" for part in ("sum", "count"))
    return f"{sums} / {counts}"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return how fast a counter grows, a second."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[{RATE}]))"


COUNTED = rate("headrace_requests_total", "lane", 'status!="cancelled"')
BULK_TOKENS = rate("headrace_generation_tokens_total", where='lane="bulk"')

OPERATIONS = [
    Panel(
        title="Requests",
        what="Ended requests a second, by lane and how they ended.",
        queries={"{{lane}} {{status}}": rate("headrace_requests_total", "lane, status")},
        unit="reqps",
    ),
    Panel(
        title="HTTP answers",
        what="Calls that generate, a second, by what they were answered; and those refused before that.",
        queries={
            "{{code}}": rate("headrace_http_requests_total", "code"),
            "refused {{code}}": rate("headrace_http_refused_requests_total", "code"),
        },
        unit="reqps",
    ),
    Panel(
        title="Workers that take work",
        what="Ready processes, by role.",
        queries={"{{role}}": "sum by (role) (headrace_worker_ready)"},
    ),
    Panel(
        title="Slots in use",
        what="Running requests of the slots that there are, by role.",
        queries={
            "{{role}}": "sum by (role) (headrace_requests_running) / (sum by (role) (headrace_slots) > 0)"
        },
        unit="percentunit",
    ),
    Panel(
        title="Queues",
        what="Messages that wait, by queue, lane and model.",
        queries={
            "{{queue}} {{lane}} {{model}}": "max by (queue, lane, model) (headrace_queue_depth)"
        },
    ),
    Panel(
        title="Oldest message that waits",
        what="By queue and lane. Empty where the gateway's user of the broker may not know.",
        queries={"{{queue}} {{lane}}": "max by (queue, lane) (headrace_queue_oldest_seconds)"},
        unit="s",
    ),
    Panel(
        title="Free KV blocks",
        what="Of each engine; leased blocks count as used.",
        queries={"{{worker}}": "headrace_kv_blocks_free / (headrace_kv_blocks > 0)"},
        unit="percentunit",
    ),
    Panel(
        title="Handoffs",
        what="A second: issued by prefill, used by decode, and what became of the others.",
        queries={
            "issued": rate("headrace_handoffs_issued_total"),
            "used": rate("headrace_handoffs_used_total"),
            "refused: {{reason}}": rate("headrace_handoffs_refused_total", "reason"),
            "expired": rate("headrace_handoffs_expired_total"),
            "orphaned": rate("headrace_handoffs_orphaned_total"),
        },
        unit="ops",
    ),
    Panel(
        title="Leased handoffs",
        what="Whose KV cache prefill keeps now.",
        queries={"{{worker}}": "headrace_handoffs_leased"},
    ),
    Panel(
        title="Tried again",
        what="A second: messages that came again, attempts at a prompt, dead letters.",
        queries={
            "redelivered {{queue}}": rate("headrace_redeliveries_total", "queue"),
            "after a failed {{after}}": rate("headrace_retries_total", "after"),
            "dead letter {{queue}}": rate("headrace_dead_letters_total", "queue"),
        },
        unit="ops",
    ),
    Panel(
        title="Cancels",
        what="A second: asked for, and by which stage carried out.",
        queries={
            "asked by {{by}}": rate("headrace_cancels_asked_total", "by"),
            "effective in {{stage}}": rate("headrace_cancels_effective_total", "stage"),
        },
        unit="ops",
    ),
    Panel(
        title="Event loop lag, p99",
        what="How late each process runs its timers: a busy one is late.",
        queries=quantiles("headrace_event_loop_lag_seconds", by="instance", of=(0.99,)),
        unit="s",
    ),
    Panel(
        title="Messages dropped",
        what="A second, by processes too slow for what they are sent. Should be none.",
        queries={"{{instance}}": rate("headrace_slow_consumer_messages_total", "instance")},
        unit="ops",
    ),
]

LATENCY = [
    Panel(
        title="Time to first token",
        what="From acceptance until decode had the first token ID, of rt requests.",
        queries=quantiles(
            "headrace_time_to_first_token_seconds", 'lane="rt"', of=(0.5, 0.95, 0.99)
        ),
        unit="s",
    ),
    Panel(
        title="Where the time goes",
        what="Mean seconds a request spends in each stage, and in the queue before it. Derender is CPU time.",
        queries={"{{stage}}": mean("headrace_request_stage_seconds", "stage")},
        unit="s",
        is_stacked=True,
    ),
    Panel(
        title="Goodput",
        what="Share of the requests that met every objective; cancelled ones count nowhere.",
        queries={
            "{{lane}}": f"{rate('headrace_goodput_requests_total', 'lane')} / {COUNTED}",
            "missed {{objective}} {{lane}}": f"{rate('headrace_slo_missed_requests_total', 'lane, objective')}"
            f" / on (lane) group_left () {COUNTED}",
        },
        unit="percentunit",
    ),
    Panel(
        title="Between tokens",
        what="Of the engine's outputs, one choice at a time.",
        queries=quantiles("headrace_inter_token_latency_seconds", of=(0.5, 0.95, 0.99)),
        unit="s",
    ),
    Panel(
        title="Whole request",
        what="From acceptance until the answer's end was published, of rt requests.",
        queries=quantiles(
            "headrace_e2e_request_latency_seconds", 'lane="rt"', of=(0.5, 0.95, 0.99)
        ),
        unit="s",
    ),
    Panel(
        title="First byte at the gateway",
        what="What clients of HTTP see, apart from the network.",
        queries=quantiles("headrace_http_time_to_first_byte_seconds", of=(0.5, 0.95)),
        unit="s",
    ),
    Panel(
        title="Wait in queues, p95",
        what="Of rt requests, by queue: req waits for render, job for decode, pf for prefill.",
        queries=quantiles(
            "headrace_request_queue_time_seconds", 'lane="rt"', by="queue", of=(0.95,)
        ),
        unit="s",
    ),
    Panel(
        title="Prefill",
        what="The forward pass of a prompt, by prefill.",
        queries=quantiles("headrace_request_prefill_time_seconds", of=(0.5, 0.95)),
        unit="s",
    ),
    Panel(
        title="Where prompts are computed",
        what="A second: by prefill, or by decode itself and why.",
        queries={
            "remote": rate("headrace_remote_prefills_total"),
            "local: {{reason}}": rate("headrace_local_prefills_total", "reason"),
        },
        unit="ops",
    ),
    Panel(
        title="KV transfer",
        what="The pull of one request: posting the read, the wire, and from then to the first token ID.",
        queries=quantiles("headrace_kv_transfer_seconds", by="part", of=(0.5, 0.95)),
        unit="s",
    ),
    Panel(
        title="KV transfer speed",
        what="Bytes a second while a pull runs: the mean, and single pulls.",
        queries={
            "mean": f"{rate('headrace_kv_transfer_bytes_total')} / "
            + rate("headrace_kv_transfer_seconds_sum", where='part!="notice"'),
            **quantiles("headrace_kv_transfer_bytes_per_second", of=(0.05, 0.5)),
        },
        unit="Bps",
    ),
    Panel(
        title="Prompt tokens computed for nothing",
        what="Share of what prefill computed that nobody pulled.",
        queries={
            "{{reason}}": f"{rate('headrace_prefill_wasted_tokens_total', 'reason')}"
            f" / on () group_left () ({rate('headrace_prefill_tokens_total')} > 0)"
        },
        unit="percentunit",
    ),
    Panel(
        title="Derender, CPU a token",
        what="Seconds of CPU that detokenizing and parsing takes for one token ID.",
        queries={
            "mean": f"{rate('headrace_derender_cpu_seconds_total')} / {rate('headrace_derender_tokens_total')}"
        },
        unit="s",
    ),
    Panel(
        title="Engines: running and waiting",
        what="vLLM's own count of requests.",
        queries={
            "running {{instance}}": "sum by (instance) (vllm:num_requests_running)",
            "waiting {{instance}}": "sum by (instance) (vllm:num_requests_waiting)",
        },
    ),
    Panel(
        title="Engines: prefix cache",
        what="Share of the prompts' token IDs that vLLM found in its own prefix cache.",
        queries={
            "{{instance}}": f"{rate('vllm:prefix_cache_hits_total', 'instance')}"
            f" / {rate('vllm:prefix_cache_queries_total', 'instance')}"
        },
        unit="percentunit",
    ),
]

BATCH = [
    Panel(
        title="Lines a second",
        what="Ended bulk requests, by how they ended.",
        queries={"{{status}}": rate("headrace_requests_total", "status", 'lane="bulk"')},
        unit="reqps",
    ),
    Panel(
        title="Tokens a second",
        what="Of bulk requests.",
        queries={
            "prompt": rate("headrace_prompt_tokens_total", where='lane="bulk"'),
            "answer": BULK_TOKENS,
        },
        unit="short",
    ),
    Panel(
        title="Share of all tokens",
        what="How much of what is generated is for bulk.",
        queries={"bulk": f"{BULK_TOKENS} / {rate('headrace_generation_tokens_total')}"},
        unit="percentunit",
    ),
    Panel(
        title="Lines that wait",
        what="By queue; the batch workers keep only some of a batch in the queues.",
        queries={
            "{{queue}} {{model}}": 'max by (queue, model) (headrace_queue_depth{lane="bulk"})'
        },
    ),
    Panel(
        title="Lines that run",
        what="Taken from a queue and not settled.",
        queries={
            "{{queue}} {{model}}": 'max by (queue, model) (headrace_queue_taken{lane="bulk"})'
        },
    ),
    Panel(
        title="Oldest line that waits",
        what="By queue.",
        queries={"{{queue}}": 'max by (queue) (headrace_queue_oldest_seconds{lane="bulk"})'},
        unit="s",
    ),
    Panel(
        title="Wait in queues",
        what="Of bulk requests, by queue.",
        queries=quantiles(
            "headrace_request_queue_time_seconds", 'lane="bulk"', by="queue", of=(0.5, 0.95)
        ),
        unit="s",
    ),
    Panel(
        title="Whole line",
        what="From acceptance until its end was published.",
        queries=quantiles("headrace_e2e_request_latency_seconds", 'lane="bulk"', of=(0.5, 0.95)),
        unit="s",
    ),
    Panel(
        title="Given back for rt",
        what="Bulk jobs a second that made room for an urgent one.",
        queries={"jobs": rate("headrace_preempted_jobs_total")},
        unit="ops",
    ),
    Panel(
        title="What rt feels of it",
        what="Time to first token of rt requests beside the running bulk lines.",
        queries=quantiles("headrace_time_to_first_token_seconds", 'lane="rt"', of=(0.5, 0.95)),
        unit="s",
    ),
    Panel(
        title="Batches that run",
        what="By batch worker.",
        queries={"{{worker}}": 'headrace_requests_running{role="batch"}'},
    ),
    Panel(
        title="Put aside",
        what="Dead letters a second; a line that ends there fails its place in the batch, not the batch.",
        queries={"{{queue}}": rate("headrace_dead_letters_total", "queue")},
        unit="ops",
    ),
]

DASHBOARDS = {"operations": OPERATIONS, "latency": LATENCY, "batch": BATCH}


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    return {
        "uid": f"headrace-{name}",
        "title": f"headrace {name}",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    columns = 24 // WIDTH
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": source,
        "gridPos": {
            "x": number % columns * WIDTH,
            "y": number // columns * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 25 if panel.is_stacked else 8,
                    "stacking": {"mode": "normal" if panel.is_stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def files() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n"
        for name, panels in DASHBOARDS.items()
    }


def main(arguments: list[str]) -> int:
    """Write the files, or say whether they are up to date; return the exit code."""
    if "--check" in arguments:
        return int(any(path.read_text() != text for path, text in files().items()))
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
