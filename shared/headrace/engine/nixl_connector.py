"""vLLM's NIXL connector, with three things added where the engine runs; loaded by vLLM, by name.

The progress thread rests between its rounds instead of spinning a core; a worker process dies with
its parent; and the statistics name the request of each pull, each freed lease and each new peer.
Importing this changes nothing: all of it happens when vLLM builds the connector in its own processes.
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
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PROGRESS_DELAY_VARIABLE = "HEADRACE_NIXL_PROGRESS_DELAY_US"

_PR_SET_PDEATHSIG = 1


class HeadraceStats(NixlKVConnectorStats):  # type: ignore[misc]  # vLLM's types are not followed
    """NIXL's statistics of one step, and whose they are."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        named: dict[str, list[Any]] = {
            "pulls": [],  # [request_id, seconds, bytes]
            "released": [],  # request IDs whose lease ended here: pulled, given back, or expired
            "peers": [],  # engine IDs that a handshake succeeded with
        }
        self.data.update(named)

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        named = self.data["pulls"] or self.data["released"] or self.data["peers"]
        return not named and super().is_empty()


class HeadraceNixlWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # vLLM's types are not followed
    """Reads blocks as vLLM does, and says for which request."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = HeadraceStats()
        self._known_peers: set[str] = set()

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()
        for request_id in list(transfers):
            one = {request_id: transfers.pop(request_id)}
            count = len(self.xfer_stats.data["transfer_duration"])
            now_done, now_failed = super()._pop_done_transfers(one)
            transfers.update(one)
            done |= now_done
            failed |= now_failed
            seconds = self.xfer_stats.data["transfer_duration"][count:]
            num_bytes = self.xfer_stats.data["bytes_transferred"][count:]
            if seconds:
                self.xfer_stats.data["pulls"].append([request_id, sum(seconds), sum(num_bytes)])
        return done, failed

    def get_transfer_results(self) -> Any:
        """Return what finished, and note whose blocks are no longer kept."""
        results = super().get_transfer_results()
        self.xfer_stats.data["released"].extend(results.finished_sending)
        return results

    def get_kv_connector_stats(self) -> Any:
        """Return this step's statistics, or None."""
        peers = set(self._remote_agents)
        self.xfer_stats.data["peers"].extend(peers - self._known_peers)
        self._known_peers = peers
        return super().get_kv_connector_stats()


class HeadraceNixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM's types are not followed
    """What `kv_connector` names."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        tie_to_parent()
        # The pull connector's own __init__ would build vLLM's worker, and with it another NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = NixlPullConnectorScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            set_progress_delay(int(os.environ.get(PROGRESS_DELAY_VARIABLE, "100")))
            self.connector_worker = HeadraceNixlWorker(vllm_config, self.engine_id, kv_cache_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeadraceStats:
        """Return statistics made of `data`, or empty ones."""
        return HeadraceStats() if data is None else HeadraceStats(data=data)


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
