"""What a worker takes from: one model's queue of one stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.shared.subjects import Lane, Role, prefill, req_filter
from headrace.shared.subjects import job as job_subject


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
    def job(cls, slug: str, lane: Lane) -> WorkQueue:
        """Rendered jobs, for decode."""
        return cls(
            "HR_JOB_RT" if lane is Lane.RT else "HR_JOB",
            f"{slug}_{lane}",
            job_subject(slug, lane),
            10.0 if lane is Lane.RT else 30.0,
            Role.DECODE,
        )

    @classmethod
    def prefill(cls, slug: str) -> WorkQueue:
        """Prompts to compute, for prefill."""
        return cls("HR_PF", slug, prefill(slug), 10.0, Role.PREFILL)

    @classmethod
    def of_model(cls, slug: str) -> tuple[WorkQueue, ...]:
        """Every queue of one model."""
        lanes = tuple(Lane)
        return (
            *(cls.req(slug, lane) for lane in lanes),
            *(cls.job(slug, lane) for lane in lanes),
            cls.prefill(slug),
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
        }
