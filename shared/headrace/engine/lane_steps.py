"""What batch work may have of the engine's steps: none in which somebody's first token ID is computed, and short ones.

A slot alone is not enough: a step takes as long as all that is in it. Whoever comes waits for the end of a step that
is under way, and would wait for the prompts and the token IDs of the batch that share the next one, too.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from headrace.engine.priorities import lane_of
from headrace.shared.subjects import Lane

_COMPUTABLE = frozenset({"WAITING", "PREEMPTED", "RUNNING"})


class LaneSteps:
    """What is added to vLLM's scheduler, whichever that is.

    Of the scheduler behind it: `schedule`, `running`, `waiting`, `max_num_running_reqs` and
    `max_num_scheduled_tokens`. A request that runs and is not in a step is nothing new to vLLM: it leaves out
    whatever a step has no room for.
    """

    num_bulk_step_token_ids: int  #: the most in a step that has batch work in it
    sits_out: bool  #: whether batch work leaves steps to others: a step is decided when the one before has ended

    _tried: frozenset[str] = frozenset()

    def schedule(self: Any, *given: Any, **named: Any) -> Any:
        """Decide what the next step does."""
        if not any(map(_is_bulk, chain(self.running, self.waiting))):
            return super().schedule(*given, **named)  # type: ignore[misc]  # of the class behind it
        urgent = self._urgent() if self.sits_out else frozenset()
        self._tried &= urgent
        if urgent <= self._tried:
            return self._short_step(*given, **named)
        return self._step_without_bulk(urgent, *given, **named)

    def _urgent(self: Any) -> frozenset[str]:
        """Return who waits for a first token ID, if all of them have a place; else nobody."""
        there = [request for request in self.waiting if not _is_bulk(request)]
        if len(self.running) + len(there) > self.max_num_running_reqs:
            return frozenset()
        requests = chain(self.running, there)
        return frozenset(r.request_id for r in requests if _waits_for_its_first(r))

    def _short_step(self: Any, *given: Any, **named: Any) -> Any:
        usual = self.max_num_scheduled_tokens
        least = 2 * self.max_num_running_reqs  # every answer goes on, and prompts do
        self.max_num_scheduled_tokens = min(usual, max(least, self.num_bulk_step_token_ids))
        try:
            return super().schedule(*given, **named)  # type: ignore[misc]  # of the class behind it
        finally:
            self.max_num_scheduled_tokens = usual

    def _step_without_bulk(self: Any, urgent: frozenset[str], *given: Any, **named: Any) -> Any:
        running = [request for request in self.running if _is_bulk(request)]
        waiting = [request for request in self.waiting if _is_bulk(request)]
        self.running = [request for request in self.running if not _is_bulk(request)]
        self.waiting.remove_requests(waiting)
        try:
            step = super().schedule(*given, **named)  # type: ignore[misc]  # of the class behind it
        finally:
            self.running += running
            for request in waiting:
                self.waiting.add_request(request)
        # What had no place although nobody else was in the step may need what the batch holds: that must go on.
        self._tried |= urgent - step.num_scheduled_tokens.keys()
        return step


def _is_bulk(request: Any) -> bool:
    return lane_of(request.priority) is Lane.BULK


def _waits_for_its_first(request: Any) -> bool:
    if lane_of(request.priority) is not Lane.RT or request.num_output_tokens > 0:
        return False
    if request.status.name not in _COMPUTABLE:
        return False
    return not (request.kv_transfer_params or {}).get("do_remote_prefill")
