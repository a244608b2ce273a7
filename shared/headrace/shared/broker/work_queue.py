"""What a worker takes from: one model's queue of one stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.shared.subjects import (
    Lane,
    Role,
    batch_filter,
    event_filter,
    hook_filter,
    job_filter,
    prefill,
    prefill_worker,
    req_filter,
)

ACK_WAIT_S = 10.0
"""Of every lane: a worker that is killed may hold its message for so long, and one that lives says so every third
of it."""
RENDER_RT_ACK_WAIT_S = 1.5
"""A killed render worker costs a person so long. Rendered twice, it is one job all the same."""
UNUSED_CONSUMER_S = 7 * 86_400
UNUSED_WORKER_S = 60  # a worker's own queue goes soon after the worker
LAST_RESORT_GROUP = "takes"
"""The name that a consumer's takes of two priorities share; the broker wants one."""


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """One model's queue of one stage, as a durable consumer: what a worker takes from."""

    stream: str
    consumer: str
    filter_subject: str
    ack_wait_s: float
    role: Role
    unused_s: int = (
        UNUSED_CONSUMER_S  #: the broker drops a consumer that nobody takes from for so long
    )
    with_last_resort: bool = False  #: a take may stand behind all others (`Broker.take`)

    @classmethod
    def req(cls, slug: str, lane: Lane) -> WorkQueue:
        """Submissions of every tenant, for render."""
        return cls(
            "HR_REQ_RT" if lane is Lane.RT else "HR_REQ",
            f"{slug}_{lane}",
            req_filter(slug, lane),
            RENDER_RT_ACK_WAIT_S if lane is Lane.RT else ACK_WAIT_S,
            Role.RENDER,
        )

    @classmethod
    def job(cls, pool: str, lane: Lane) -> WorkQueue:
        """Rendered jobs of one contract, of every tenant, for decode."""
        return cls(
            "HR_JOB_RT" if lane is Lane.RT else "HR_JOB",
            f"{pool}_{lane}",
            job_filter(pool, lane),
            ACK_WAIT_S,
            Role.DECODE,
            # A worker that would have to preempt a job gets one only when no worker has a free slot.
            with_last_resort=lane is Lane.RT,
        )

    @classmethod
    def prefill(cls, pool: str, lane: Lane) -> WorkQueue:
        """Prompts to compute under one contract, for prefill."""
        return cls("HR_PF", f"{pool}_{lane}", prefill(pool, lane), ACK_WAIT_S, Role.PREFILL)

    @classmethod
    def prefill_worker(cls, pool: str, instance: str) -> WorkQueue:
        """Prompts that one prefill worker alone is asked to compute."""
        return cls(
            "HR_PF",
            f"{pool}_{instance}",
            prefill_worker(pool, instance),
            ACK_WAIT_S,
            Role.PREFILL,
            UNUSED_WORKER_S,
        )

    @classmethod
    def batch(cls) -> WorkQueue:
        """Batches of every tenant and model, for a batch worker."""
        return cls("HR_BATCH", "batch", batch_filter(), 10.0, Role.BATCH)

    @classmethod
    def events(cls, kind: str) -> WorkQueue:
        """Events of one kind that may have to be sent as webhooks."""
        return cls("HR_EV", f"hooks_{kind}", event_filter(kind), 10.0, Role.BATCH)

    @classmethod
    def hooks(cls) -> WorkQueue:
        """Webhooks that are to be sent; what is taken stays so while one request to a receiver may last."""
        return cls("HR_HOOK", "hooks", hook_filter(), 60.0, Role.BATCH)

    @classmethod
    def of_model(cls, slug: str, pool: str) -> tuple[WorkQueue, ...]:
        """Every queue of one model and contract."""
        lanes = tuple(Lane)
        return (
            *(cls.req(slug, lane) for lane in lanes),
            *(cls.job(pool, lane) for lane in lanes),
            *(cls.prefill(pool, lane) for lane in lanes),
        )

    @property
    def lane(self) -> Lane:
        """Whose messages it has, where it is a lane's. Raises: ValueError where it is not."""
        return Lane(self.filter_subject.rpartition(".")[2])

    def config(self, replicas: int) -> dict[str, Any]:
        """Return the consumer as the broker's API takes it."""
        priorities = {"priority_groups": [LAST_RESORT_GROUP], "priority_policy": "prioritized"}
        return {
            **(priorities if self.with_last_resort else {}),
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
            "inactive_threshold": self.unused_s * 10**9,
        }
