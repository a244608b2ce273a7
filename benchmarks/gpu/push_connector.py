"""vLLM's push connector with headrace's statistics and order of blocks: what `gap.py` compares a pull with.

headrace itself does not push: docs/adr/0013-the-kv-cache-is-pulled.md says why.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPushConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
    NixlPushConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from headrace.engine.nixl_connector import set_progress_delay, tie_to_parent
from headrace.engine.nixl_worker import HeadraceStats, PullCost
from headrace.engine.vllm_block_order import keep_side_by_side

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PushWorker(NixlPushConnectorWorker):  # type: ignore[misc]  # vLLM's types are not followed
    """Says when a request's blocks were there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.xfer_stats = HeadraceStats()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return what finished (0.26 asks so)."""
        sent, received = super().get_finished()
        for request_id in received:
            cost = PullCost(0.0, 0.0, 0, 0, time.perf_counter())
            self.xfer_stats.data["pulls"].append([request_id, *cost])
        return sent, received

    def get_transfer_results(self) -> Any:
        """Return what finished (later ones ask so)."""
        results = super().get_transfer_results()
        for request_id in results.finished_recving:
            cost = PullCost(0.0, 0.0, 0, 0, time.perf_counter())
            self.xfer_stats.data["pulls"].append([request_id, *cost])
        return results


class PushConnector(NixlPushConnector):  # type: ignore[misc]  # vLLM's types are not followed
    """What `kv_connector` names."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        tie_to_parent()
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        given = (vllm_config, self.engine_id, kv_cache_config)
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlPushConnectorScheduler(*given)
        else:
            set_progress_delay(100)
            self.connector_worker = PushWorker(*given)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Let the blocks of a prompt lie side by side."""
        keep_side_by_side(gpu_block_pool)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadraceStats:
        """Return statistics made of `data`, or empty ones."""
        return HeadraceStats() if data is None else HeadraceStats(data=data)
