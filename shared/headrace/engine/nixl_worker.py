"""What of vLLM's NIXL connector moves blocks: reads only within the lease, and says for which request.

A pull that starts or ends after its lease fails, instead of bringing another prompt's blocks; prefill can drop
a lease that nobody knows of; the statistics name the request of each pull, each freed lease and each new peer.
The scheduler may ask between two steps what has come.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.logger import init_logger

from headrace.engine import nixl_versions
from headrace.engine.lease_book import LeaseBook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        RemoteMeta,
        ReqMeta,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

PULL_TIMEOUT_KEY = "headrace_pull_timeout_s"
MAX_DROPPED = 1_000

_NAMED = ("pulls", "released", "peers", "stalled", nixl_versions.FAILED_HANDSHAKES)

logger = init_logger("vllm." + __name__)  # vLLM's processes show what is below this name


class PullCost(NamedTuple):
    """What one request's pull has cost."""

    post_s: float  #: making and posting the read
    wire_s: float  #: from then until NIXL said that all is there; it is asked in every step
    num_bytes: int
    num_descriptors: int  #: pieces of memory in which it was read
    came: float  #: when NIXL said so, by the host's monotonic clock (`time.perf_counter`)


class HeadraceStats(NixlKVConnectorStats):  # type: ignore[misc]  # vLLM's types are not followed
    """NIXL's statistics of one step, and whose they are."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        named: dict[str, list[Any]] = {
            "pulls": [],  # the request ID, and the fields of `PullCost`
            "released": [],  # request IDs whose lease ended here: pulled, given back, or expired
            "peers": [],  # engine IDs that a handshake succeeded with
            "stalled": [],  # request IDs whose pull takes too long
        }
        self.data.update(named)
        nixl_versions.add_missing_counts(self.data)

    def is_empty(self) -> bool:
        """Return whether there is nothing to tell."""
        named = any(self.data[name] for name in _NAMED)
        return not named and super().is_empty()


class HeadraceNixlWorker(NixlPullConnectorWorker):  # type: ignore[misc]  # vLLM's types are not followed
    """Reads blocks as vLLM does, within their lease, and says for which request."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = HeadraceStats()
        self._known_peers: set[str] = set()
        stalled_s = vllm_config.kv_transfer_config.get_from_extra_config(PULL_TIMEOUT_KEY, 10.0)
        self._leases = LeaseBook(self._lease_extension, stalled_s)
        self._posted: dict[str, tuple[float, float]] = {}  # when posting began and ended
        self._came: set[str] = set()  # whose blocks were found to be there
        self._is_asked = False
        self._arrived: set[str] = set()  # for the scheduler to ask for
        self._untold: tuple[set[str], ...] = (set(), set(), set())  # sent, received and failed
        self._dropped: OrderedDict[str, None] = OrderedDict()

    def drop_lease(self, run_id: str) -> None:
        """Free the blocks of a task's run, now or as soon as it is done: nobody has its handoff."""
        self._dropped[run_id] = None
        if len(self._dropped) > MAX_DROPPED:
            self._dropped.popitem(last=False)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Start the pulls that the scheduler asks for."""
        now = time.perf_counter()
        for request_id, meta in metadata.reqs_to_recv.items():
            if nixl_versions.awaits_kv(meta):
                self._leases.begin(request_id, now)
        super().start_load_kv(metadata)

    def _send_heartbeats(self, metadata: NixlConnectorMetadata) -> None:
        # Those that have shaken hands only now get none.
        sent = [
            request_id
            for engine_id, one in metadata.heartbeat_by_engine.items()
            if engine_id in self._remote_agents
            for request_id in one.req_ids
        ]
        super()._send_heartbeats(metadata)
        if metadata.heartbeat_by_engine:
            self._leases.heartbeat(sent, time.perf_counter())

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        # Without a handshake nothing is read: this is called again once it is done.
        if (
            nixl_versions.awaits_kv(meta)
            and meta.remote.engine_id in self._remote_agents
            and not self._may_read(req_id, meta.remote)
        ):
            logger.warning("pull of %s refused: its lease has ended, or ends now", req_id)
            nixl_versions.fail_pull(self, req_id)
            return
        began = time.perf_counter()
        super()._read_blocks_for_req(req_id, meta)
        if req_id in self._recving_transfers:
            self._posted[req_id] = (began, time.perf_counter())

    def _may_read(self, request_id: str, remote: RemoteMeta) -> bool:
        expiry = remote.blocks_expiry_time
        if expiry is not None:
            expiry -= self._engine_clock_offset[remote.engine_id]
        return self._leases.may_read(request_id, remote.request_id, expiry, time.perf_counter())

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> Any:
        done: set[str] = set()
        failed: set[str] = set()
        for request_id in list(transfers):
            one = {request_id: transfers.pop(request_id)}
            count = len(self.xfer_stats.data["transfer_duration"])
            now_done, now_failed = nixl_versions.done_and_failed(super()._pop_done_transfers(one))
            transfers.update(one)
            if (
                now_done
                and not now_failed
                and self._leases.is_late(request_id, time.perf_counter())
            ):
                logger.warning("pull of %s thrown away: it ended after its lease", request_id)
                now_failed = {request_id}
            done |= now_done
            failed |= now_failed
            if len(self.xfer_stats.data["transfer_duration"]) > count:
                self._add_pull(request_id, count)
        self._came |= done - failed - nixl_versions.failed_in_queue(self)
        return nixl_versions.popped(self, done, failed)

    def _add_pull(self, request_id: str, count: int) -> None:
        """Tell what a pull has cost; NIXL's own statistics of its transfers stand behind the first `count`."""
        now = time.perf_counter()
        began, posted = self._posted.get(request_id, (now, now))
        cost = PullCost(
            post_s=posted - began,
            wire_s=now - posted,
            num_bytes=sum(self.xfer_stats.data["bytes_transferred"][count:]),
            num_descriptors=sum(self.xfer_stats.data["num_descriptors"][count:]),
            came=now,
        )
        self.xfer_stats.data["pulls"].append([request_id, *cost])

    def arrived(self) -> set[str]:
        """Return whose blocks have come since the last call; from the first call on, no step tells it.

        The scheduler calls this before each step, and makes steps as long as anybody waits for blocks.
        """
        self._is_asked = True
        if self._recving_transfers:
            self._untold = nixl_versions.finished_transfers(self)
        arrived, self._arrived = self._arrived, set()
        return arrived

    def get_transfer_results(self) -> Any:
        """Return what finished, and note whose blocks are no longer kept."""
        self._came.clear()
        results = super().get_transfer_results()
        self._note(results.finished_sending, results.finished_recving)
        self._sort_out(results.finished_sending, results.finished_recving, results.failed_recving)
        return results

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Do the same for a vLLM that asks in this way."""
        self._came.clear()
        sent, received = super().get_finished()
        self._note(sent, received)
        self._sort_out(sent, received, set())
        return sent, received

    def _sort_out(self, sent: set[str], received: set[str], failed: set[str]) -> None:
        """Put aside what `arrived` tells, and add what it found and did not tell: failures."""
        if self._is_asked:
            arrived = (received & self._came) - failed
            received -= arrived
            self._arrived |= arrived
        for known, untold in zip((sent, received, failed), self._untold, strict=True):
            known |= untold
        self._untold = (set(), set(), set())

    def _note(self, sent: set[str], received: set[str]) -> None:
        """Add dropped leases to those whose blocks were sent, and take note of all that ended."""
        sent.update(self._drop_leases())
        self.xfer_stats.data["released"].extend(sent)
        for request_id in received:
            self._leases.end(request_id)
            self._posted.pop(request_id, None)
        self.xfer_stats.data["stalled"].extend(self._leases.stalled(time.perf_counter()))

    def _log_failure(self, failure_type: str, *args: Any, **kwargs: Any) -> None:
        super()._log_failure(failure_type, *args, **kwargs)
        nixl_versions.count_failure(self.xfer_stats, failure_type)

    def _drop_leases(self) -> set[str]:
        """End the leases of dropped runs, and return their requests."""
        if not self._dropped:
            return set()
        dropped = {name for name in self._reqs_to_send if name.rpartition("-")[0] in self._dropped}
        for request_id in dropped:
            del self._reqs_to_send[request_id]
            self._reqs_to_process.discard(request_id)
            self._dropped.pop(request_id.rpartition("-")[0])
        return dropped

    def get_kv_connector_stats(self) -> Any:
        """Return this step's statistics, or None."""
        peers = set(self._remote_agents)
        self.xfer_stats.data["peers"].extend(peers - self._known_peers)
        self._known_peers = peers
        return super().get_kv_connector_stats()


class WorkerCalls:
    """What the service may call in vLLM's worker processes, by name (`worker_extension_cls`)."""

    def headrace_drop_lease(self, run_id: str) -> None:
        """See `HeadraceNixlWorker.drop_lease`."""
        get_kv_transfer_group().connector_worker.drop_lease(run_id)
