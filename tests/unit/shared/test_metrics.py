from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram

from headrace.shared import metrics
from headrace.shared.messages import Status, Terminal, Timings
from headrace.shared.metrics import Slo
from headrace.shared.subjects import Lane
from headrace.shared.tally import Tally

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
QUICK = Timings(first_token_s=0.5, decode_s=1.0, num_output_token_ids=21, total_s=1.6)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def terminal(timings: Timings, status: Status = "ok") -> Terminal:
    return Terminal(request_id="r", seq=0, status=status, http_status=200, timings=timings)


@pytest.mark.parametrize(
    ("ended", "missed"),
    [
        (terminal(QUICK), set()),
        (terminal(Timings(first_token_s=1.5)), {"ttft"}),
        (terminal(Timings(first_token_s=0.5, decode_s=4.0, num_output_token_ids=21)), {"tpot"}),
        (terminal(QUICK, "error"), {"failed"}),
        (terminal(Timings(first_token_s=3.0), "expired"), {"failed", "ttft"}),
    ],
)
def test_a_request_is_good_only_if_it_meets_every_objective(
    ended: Terminal, missed: set[str]
) -> None:
    def counts() -> dict[str, float]:
        found = {
            objective: value("headrace_slo_missed_requests_total", lane="std", objective=objective)
            for objective in ("ttft", "tpot", "failed")
        }
        return {**found, "good": value("headrace_goodput_requests_total", lane="std")}

    before = counts()
    metrics.request_ended(Lane.STD, ended, SLO)
    after = counts()
    grown = {name for name, count in after.items() if count > before[name]}
    assert grown == (missed or {"good"})


def test_a_cancelled_request_is_neither_good_nor_bad() -> None:
    def counts() -> list[float]:
        return [
            value("headrace_goodput_requests_total", lane="bulk"),
            value("headrace_slo_missed_requests_total", lane="bulk", objective="failed"),
        ]

    before = counts()
    metrics.request_ended(Lane.BULK, terminal(QUICK, "cancelled"), SLO)
    assert counts() == before
    assert value("headrace_requests_total", lane="bulk", status="cancelled") > 0


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("hr.v1.req.acme.m.std", ("req", "std")),
        ("hr.v1.job.m_0a.acme.rt", ("job", "rt")),
        ("hr.v1.pf.m_0a.bulk", ("pf", "bulk")),
        ("hr.v1.pf.m_0a.prefill-0a1b2c3d", ("pf", "own")),
    ],
)
def test_a_queue_is_named_by_its_stage_and_lane(subject: str, expected: tuple[str, str]) -> None:
    assert metrics.queue_of(subject) == expected


def test_a_tally_says_what_a_histogram_says() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    tally = Tally("a", "what", buckets=(0.1, 1.0), registry=registry)
    histogram = Histogram("a", "what", buckets=(0.1, 1.0), registry=other)
    for seconds in (0.05, 0.1, 0.5, 1.0, 7.0):
        tally.observe(seconds)
        histogram.observe(seconds)

    def samples(of: CollectorRegistry) -> set[tuple[str, str, float]]:
        return {
            (sample.name, sample.labels.get("le", ""), sample.value)
            for family in of.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert samples(registry) == samples(other)


def test_what_an_alert_waits_for_is_shown_before_it_happens() -> None:
    process = "from headrace.shared import metrics; from prometheus_client import generate_latest"
    shown = subprocess.run(
        [sys.executable, "-c", f"{process}; print(generate_latest().decode())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in (
        'headrace_dead_letters_total{queue="job"} 0.0',
        'headrace_handoffs_refused_total{reason="expired"} 0.0',
        'headrace_requests_total{lane="rt",status="error"} 0.0',
        "headrace_slow_consumer_messages_total 0.0",
    ):
        assert line in shown.splitlines()
