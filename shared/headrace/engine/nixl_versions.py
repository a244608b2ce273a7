"""Where vLLM 0.26 to 0.33 differ in NIXL's worker. A number says with which release a thing came.

- Finished transfers are asked for by `get_transfer_results`, an object (0.30); until then by `get_finished`, two sets.
- `_pop_done_transfers` tells what failed (0.30); until then that stands in a queue, which is read after it.
- A request that only tells prefill to free blocks is marked (`awaiting_kvs`, 0.30); it has no blocks of its own.
- Failed handshakes are counted (0.31); until then they are told to `_log_failure` alone.
"""

from __future__ import annotations

from typing import Any

FAILED_HANDSHAKES = "num_failed_handshakes"


def awaits_kv(meta: Any) -> bool:
    """Return whether a request of NIXL's metadata waits for blocks, and does not only free prefill's."""
    return bool(vars(meta).get("awaiting_kvs", any(meta.local_block_ids)))


def done_and_failed(popped: Any) -> tuple[set[str], set[str]]:
    """Return what `_pop_done_transfers` tells: the finished requests, and which of them failed."""
    return popped if isinstance(popped, tuple) else (popped, set())


def failed_in_queue(worker: Any) -> set[str]:
    """Return what has failed and is not told yet, where a queue alone says so."""
    if hasattr(worker, "_recv_failures"):
        return set()
    with worker._failed_recv_reqs.mutex:
        return set(worker._failed_recv_reqs.queue)


def finished_transfers(worker: Any) -> tuple[set[str], set[str], set[str]]:
    """Ask a worker what has finished: sent, received, and which of these have failed, where it says so."""
    if not hasattr(worker, "_recv_failures"):
        return (*worker.get_finished(), set())
    results = worker.get_transfer_results()
    return results.finished_sending, results.finished_recving, results.failed_recving


def popped(worker: Any, done: set[str], failed: set[str]) -> Any:
    """Return from a worker's `_pop_done_transfers` what this release's caller takes."""
    if hasattr(worker, "_recv_failures"):
        return done, failed
    for request_id in failed:
        fail_pull(worker, request_id)
    return done


def fail_pull(worker: Any, request_id: str) -> None:
    """Let a pull fail that moves nothing, so that the scheduler hears of it; it counts as no failed transfer."""
    if hasattr(worker, "_recv_failures"):
        worker._handle_failed_transfer(request_id, None, worker._recv_failures, False)
    else:
        worker._handle_failed_transfer(request_id, None)


def add_missing_counts(data: dict[str, list[Any]]) -> None:
    """Add to NIXL's statistics what an older release does not count."""
    data.setdefault(FAILED_HANDSHAKES, [])


def count_failure(stats: Any, failure_type: str) -> None:
    """Count a failed handshake where vLLM itself does not."""
    if failure_type == "handshake_setup_failed" and not hasattr(stats, "record_failed_handshake"):
        stats.data[FAILED_HANDSHAKES].append(1)
