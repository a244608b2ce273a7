"""What vLLM tells after each step, kept as `EngineStats` and as facts about single requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from headrace.engine.interface import EngineStats
from headrace.engine.nixl_worker import PullCost

# vLLM says nothing while it rests; after a pause this long nothing is in it.
IDLE_S = 0.5
MAX_REMEMBERED = 4096
_FAILURES = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes")


class Recorder(StatLoggerBase):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's stat logger of one engine. vLLM calls it on the event loop."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.changed = asyncio.Event()
        self.peers: set[str] = set()
        self.num_failures = 0
        self._usage = 0.0
        self._last_step = 0.0
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
        self._pulls: OrderedDict[str, PullCost] = OrderedDict()
        self._stalled: dict[str, Callable[[], None]] = {}
        self._leases: set[str] = set()
        self._released: OrderedDict[str, None] = OrderedDict()

    def log_engine_initialized(self) -> None:
        """Say nothing: the service logs its own start."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the numbers of one step."""
        if iteration_stats is not None:
            source = iteration_stats.prompt_token_stats
            self._count("num_external_cached_token_ids", source.external_kv_transfer)
            self._count("num_local_computed_token_ids", source.computed)
        if scheduler_stats is None:
            return
        self._count("num_steps", 1)
        self._usage = scheduler_stats.kv_cache_usage
        self._last_step = time.monotonic()
        if scheduler_stats.kv_connector_stats:
            self._record_transfers(scheduler_stats.kv_connector_stats)

    def add_lease(self, remote_request_id: str) -> None:
        """A handoff was made; `record` hears of its end, which may have come before this call."""
        if self._released.pop(remote_request_id, self) is self:
            self._leases.add(remote_request_id)

    def watch_pull(self, sequence_id: str, on_stalled: Callable[[], None]) -> None:
        """Call `on_stalled` once if a sequence's pull takes too long."""
        self._stalled[sequence_id] = on_stalled

    def unwatch_pull(self, sequence_id: str) -> None:
        """Call it no more."""
        self._stalled.pop(sequence_id, None)

    def take_pull(self, sequence_id: str) -> PullCost | None:
        """Return what a sequence's pull has cost, once."""
        return self._pulls.pop(sequence_id, None)

    def stats(self, num_running: int, num_blocks: int) -> EngineStats:
        """Return the counters."""
        resting = not self._leases and time.monotonic() - self._last_step > IDLE_S
        usage = 0.0 if num_running == 0 and resting else self._usage
        return EngineStats(
            num_running=num_running,
            num_blocks_free=round((1.0 - usage) * num_blocks),
            num_leases=len(self._leases),
            **self._counts,
        )

    def _record_transfers(self, data: dict[str, list[Any]]) -> None:
        self._count("kv_transfer_bytes", sum(data["bytes_transferred"]))
        self._count("kv_transfer_s", sum(data["transfer_duration"]))
        self._count("num_kv_transfers", len(data["transfer_duration"]))
        self._count("num_failed_kv_transfers", sum(len(data[name]) for name in _FAILURES))
        self._count("num_expired_leases", len(data["num_kv_expired_reqs"]))
        for request_id, *cost in data["pulls"]:
            _remember(self._pulls, _ours(request_id), PullCost(*cost))
        for request_id in data["stalled"]:
            if (on_stalled := self._stalled.pop(_ours(request_id), None)) is not None:
                on_stalled()
        for request_id in data["released"]:
            if request_id in self._leases:
                self._leases.discard(request_id)
            else:
                _remember(self._released, request_id, None)
        if data["peers"] or data["num_failed_handshakes"] or data["released"]:
            self.peers.update(data["peers"])
            self.num_failures += len(data["num_failed_handshakes"])
            self.changed.set()

    def _count(self, name: str, more: float) -> None:
        self._counts[name] += more


_COUNTERS = (
    "num_steps",
    "num_external_cached_token_ids",
    "num_local_computed_token_ids",
    "kv_transfer_bytes",
    "kv_transfer_s",
    "num_kv_transfers",
    "num_failed_kv_transfers",
    "num_expired_leases",
)


def _ours(request_id: str) -> str:
    """Return the ID that we gave to vLLM; its own is that and a dash and 8 hex digits."""
    return request_id.rpartition("-")[0]


def _remember(facts: OrderedDict[str, Any], key: str, value: Any) -> None:
    """Keep a fact that somebody may ask for; the oldest go, as the asker may never come."""
    facts[key] = value
    while len(facts) > MAX_REMEMBERED:
        facts.popitem(last=False)
