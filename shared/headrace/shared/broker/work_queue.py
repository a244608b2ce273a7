"""What a worker takes from: one model's queue of one stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.shared.subjects import Lane, Role, prefill, req_filter
from headrace.shared.subjects import job as job_subject

UNUSED_CONSUMER_S = 7 * 86_400


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """One model's queue of one stage, as a durable consumer: what a worker takes from."""

    stream: str
    consumer: str
    filter_subject: str
    ack_wait_s: float
    role: Role

    @classmethod
    def req(cls, slug: str, lane: Lane) -> WorkQueue:
        """Submissions of every tenant, for render."""
        return cls(
            "HR_REQ_RT" if lane is Lane.RT else "HR_REQ",
            f"{slug}_{lane}",
            req_filter(slug, lane),
            10.0 if lane is Lane.RT else 30.0,
            Role.RENDER,
        )

    @classmethod
    def job(cls, pool: str, lane: Lane) -> WorkQueue:
        """Rendered jobs of one contract, for decode."""
        return cls(
            "HR_JOB_RT" if lane is Lane.RT else "HR_JOB",
            f"{pool}_{lane}",
            job_subject(pool, lane),
            10.0 if lane is Lane.RT else 30.0,
            Role.DECODE,
        )

    @classmethod
    def prefill(cls, pool: str, lane: Lane) -> WorkQueue:
        """Prompts to compute under one contract, for prefill."""
        return cls("HR_PF", f"{pool}_{lane}", prefill(pool, lane), 10.0, Role.PREFILL)

    @classmethod
    def of_model(cls, slug: str, pool: str) -> tuple[WorkQueue, ...]:
        """Every queue of one model and contract."""
        lanes = tuple(Lane)
        return (
            *(cls.req(slug, lane) for lane in lanes),
            *(cls.job(pool, lane) for lane in lanes),
            *(cls.prefill(pool, lane) for lane in lanes),
        )

    def config(self, replicas: int) -> dict[str, Any]:
        """Return the consumer as the broker's API takes it."""
        return {
            "durable_name": self.consumer,
            "name": self.consumer,
            "filter_subject": self.filter_subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s * 10**9),
            # For ever: after the last delivery a work queue would keep the message with nobody to take it.
            # The workers count, and move a message to the dead letters themselves.
            "max_deliver": -1,
            "max_ack_pending": -1,  # each worker's free slots are the limit
            "max_waiting": 8192,  # takes that wait, one a free slot of every worker
            "num_replicas": replicas,
            # Each contract has consumers of its own, and a new one comes with each new setting. What waits in a
            # stream whose consumer is gone is taken by the next worker that declares it.
            "inactive_threshold": UNUSED_CONSUMER_S * 10**9,
        }
