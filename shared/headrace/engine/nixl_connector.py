"""vLLM's NIXL connector, with a few things added where the engine runs; loaded by vLLM, by name.

The worker is `nixl_worker.py`'s. A handoff says when its lease ends. A prompt's blocks lie side by side
(`vllm_block_order.py`). The progress thread rests between its
rounds instead of spinning a core; and a worker process dies with its parent. Importing this changes nothing:
all of it happens when vLLM builds the connector in its own processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlBaseConnector,
    NixlPullConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)

from headrace.engine.nixl_worker import HeadraceNixlWorker, HeadraceStats
from headrace.engine.vllm_block_order import keep_side_by_side

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

PROGRESS_DELAY_VARIABLE = "HEADRACE_NIXL_PROGRESS_DELAY_US"

_PR_SET_PDEATHSIG = 1


class HeadraceNixlScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """Says when a lease ends, in the clock whose distance the handshake measures."""

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, Any]:
        """Return whether the blocks are kept, and the handoff."""
        is_kept, handoff = super().request_finished(request, block_ids)
        if is_kept and handoff is not None:
            handoff["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
        return is_kept, handoff


class HeadraceNixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM's types are not followed
    """What `kv_connector` names."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        tie_to_parent()
        # The pull connector's own __init__ would build vLLM's worker, and with it another NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HeadraceNixlScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            set_progress_delay(int(os.environ.get(PROGRESS_DELAY_VARIABLE, "100")))
            self.connector_worker = HeadraceNixlWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool that the scheduler has made, before it gives out a block."""
        super().bind_gpu_block_pool(gpu_block_pool)
        keep_side_by_side(gpu_block_pool)

    def arrived(self) -> set[str]:
        """Return whose blocks have come since the last call; only for a scheduler in the worker's process."""
        worker = _worker_here(self.engine_id)
        return worker.arrived() if worker is not None else set()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadraceStats:
        """Return statistics made of `data`, or empty ones."""
        return HeadraceStats() if data is None else HeadraceStats(data=data)


def _worker_here(engine_id: str) -> HeadraceNixlWorker | None:
    """Return the worker of an engine that has it in the scheduler's process."""
    if not has_kv_transfer_group():
        return None
    worker = get_kv_transfer_group().connector_worker
    return worker if worker.engine_id == engine_id else None


def tie_to_parent() -> None:
    """Let the kernel kill this process when its parent dies; nothing happens in the service's own.

    vLLM's processes would otherwise outlive a killed parent, with the memory, the port and a core.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    # After a fork, signals meant for this process would wake the parent's event loop.
    signal.set_wakeup_fd(-1)
    # Ctrl-C reaches the whole process group, but the service drains first and then ends the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)  # it died before the line above


def set_progress_delay(delay_us: int) -> None:
    """Let the progress thread of NIXL agents made from now on rest `delay_us` between its rounds.

    NIXL's Python API sets 0, which spins a core even when nothing moves.
    """
    from vllm.distributed.nixl_utils import NixlWrapper

    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    make_agent = getattr(bindings.nixlAgent, "without_delay", bindings.nixlAgent)

    def make_agent_with_delay(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    make_agent_with_delay.without_delay = make_agent  # type: ignore[attr-defined]
    bindings.nixlAgent = make_agent_with_delay
