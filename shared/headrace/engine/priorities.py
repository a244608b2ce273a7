"""In which order the engines schedule requests: vLLM's `priority`, lower runs earlier."""

from __future__ import annotations

from headrace.shared.subjects import Lane

LANE_STEP = 1_000_000
"""A client's own priority moves its request within the lane, by less than half of this."""

_LANES = tuple(Lane)


def engine_priority(lane: Lane, wanted: int) -> int:
    """Return the priority of a request: first the lane counts, then what the client asked for."""
    half = LANE_STEP // 2 - 1
    return _LANES.index(lane) * LANE_STEP + max(-half, min(half, wanted))


def lane_of(priority: int) -> Lane:
    """Return the lane of a request with this priority."""
    return _LANES[max(0, min(len(_LANES) - 1, round(priority / LANE_STEP)))]
