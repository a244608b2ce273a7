"""In which order the engines schedule requests."""

from __future__ import annotations

from headrace.shared.messages import Job
from headrace.shared.subjects import Lane

LANE_STEP = 1_000_000
"""A client's own priority moves its request within the lane, by less than this."""


def engine_priority(job: Job) -> int:
    """Return vLLM's scheduling priority (lower runs earlier): first the lane, then what the client asked for."""
    lane = list(Lane).index(job.lane)
    half = LANE_STEP // 2 - 1
    return lane * LANE_STEP + max(-half, min(half, job.priority))
