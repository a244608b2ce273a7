"""What batch work may have of the engine's steps: none in which somebody's first token ID is computed, and short ones.

A slot alone is not enough: a step takes as long as all that is in it. Whoever comes waits for the end of a step that
is under way, and would wait for the prompts and the token IDs of the batch that share the next one, too.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from headrace.engine.priorities import lane_of
from headrace.shared.subjects import Lane

MAX_ASIDE = 8
"""Steps in a row that batch work sits out, and then has one: it goes on, however many come."""

_COMPUTABLE = frozenset({"WAITING", "PREEMPTED", "RUNNING"})


class LaneSteps:
    """What is added to vLLM's scheduler, whichever that is.

    A request that runs and is not in a step is nothing new to vLLM: it leaves out whatever a step has no room for.
    Batch work sits out only where that can neither make another request lose its blocks nor let in more requests
    than the engine has room for; vLLM counts neither what is set aside.
    """

    num_bulk_step_token_ids: int  #: the most in a step that has batch work in it
    sits_out: bool  #: whether batch work leaves steps to others: a step is decided when the one before has ended

    _tried: frozenset[str] = frozenset()
    _num_aside: int = 0

    def schedule(self: Any, *given: Any, **named: Any) -> Any:
        """Decide what the next step does."""
        if not any(map(_is_bulk, chain(self.running, self.waiting))):
            return super().schedule(*given, **named)  # type: ignore[misc]  # of the class behind it
        urgent = self._urgent() if self.sits_out else frozenset()
        self._tried &= urgent
        if urgent <= self._tried or self._num_aside >= MAX_ASIDE:
            self._num_aside = 0
            return self._short_step(*given, **named)
        self._num_aside += 1
        return self._step_without_bulk(urgent, *given, **named)

    def _urgent(self: Any) -> frozenset[str]:
        """Return who waits for a first token ID, if batch work can be set aside; else nobody."""
        if self.parallel_config.pipeline_parallel_size > 1:  # steps overlap
            return frozenset()
        set_aside = sum(map(_can_wait, self.waiting))
        if len(self.requests) - set_aside > self.max_num_running_reqs:
            return frozenset()
        there = [r for r in chain(self.running, self.waiting) if not _is_bulk(r)]
        size = self.cache_config.block_size
        # Twice: a model with several kinds of layers has blocks of each.
        needed = 2 * sum(1 + (r.num_tokens - r.num_computed_tokens) // size for r in there)
        if self.kv_cache_manager.block_pool.get_num_free_blocks() < needed:
            return frozenset()
        return frozenset(r.request_id for r in there if _waits_for_its_first(r))

    def _short_step(self: Any, *given: Any, **named: Any) -> Any:
        usual = self.max_num_scheduled_tokens
        if self.scheduler_config.enable_chunked_prefill:
            # Every answer goes on, with its drafts, and so does a prompt, by a block at least.
            least = self.max_num_running_reqs * (2 + self.num_spec_tokens)
            least += self.cache_config.block_size
            self.max_num_scheduled_tokens = min(usual, max(least, self.num_bulk_step_token_ids))
        try:
            return super().schedule(*given, **named)  # type: ignore[misc]  # of the class behind it
        finally:
            self.max_num_scheduled_tokens = usual

    def _step_without_bulk(self: Any, urgent: frozenset[str], *given: Any, **named: Any) -> Any:
        running = [request for request in self.running if _is_bulk(request)]
        waiting = [request for request in self.waiting if _can_wait(request)]
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


def _is_pulled(request: Any) -> bool:
    """Whether its prompt comes from elsewhere: to ask for it takes no computing, and somebody holds it until then."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))


def _can_wait(request: Any) -> bool:
    return _is_bulk(request) and not _is_pulled(request)


def _waits_for_its_first(request: Any) -> bool:
    if lane_of(request.priority) is not Lane.RT or request.num_output_tokens > 0:
        return False
    return request.status.name in _COMPUTABLE and not _is_pulled(request)
