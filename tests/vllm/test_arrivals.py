"""Who hears when of blocks that have come: the scheduler before its next step, of failures with it; no engine."""

from __future__ import annotations

import queue
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest


class Agent:
    """NIXL: what each read says of itself."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1e3, postDuration=1, totalBytes=10, descCount=2)

    def release_xfer_handle(self, handle: int) -> None:
        del self.states[handle]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with three reads under way; vLLM's own part is its poll of them."""
    import headrace.engine.vllm_env  # noqa: F401, I001 - first
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    from headrace.engine import nixl_worker
    from headrace.engine.lease_book import LeaseBook

    def poll(worker: Any) -> Any:
        done, failed = worker._pop_done_transfers(worker._recving_transfers)
        worker._recv_failures |= failed
        failed = {r for r in worker._recv_failures if r not in worker._recving_transfers}
        worker._recv_failures -= failed
        return KVConnectorTransferResults(set(), done | failed, failed)

    monkeypatch.setattr(nixl_worker.NixlPullConnectorWorker, "get_transfer_results", poll)
    made = nixl_worker.HeadraceNixlWorker.__new__(nixl_worker.HeadraceNixlWorker)
    made.nixl_wrapper = Agent()
    made.xfer_stats = nixl_worker.HeadraceStats()
    made._leases = LeaseBook(20.0, 10.0)
    made._dropped, made._posted = {}, {"a": (1.0, 1.25)}
    made._recving_transfers = defaultdict(list, {"a": [1], "b": [2], "c": [3]})
    made._recving_metadata, made._recv_failures = {}, set()
    made._is_asked, made._came, made._arrived = False, set(), set()
    made._untold = (set(), set(), set())
    made.nixl_wrapper.states = {1: "DONE", 2: "PROC", 3: "PROC"}
    monkeypatch.setattr(made, "_log_failure", lambda **_: None)
    return made


def test_a_scheduler_that_does_not_ask_hears_of_it_with_a_step(worker: Any) -> None:
    assert worker.get_transfer_results().finished_recving == {"a"}


def test_one_that_asks_hears_it_once_and_before_the_next_step(worker: Any) -> None:
    assert worker.arrived() == {"a"}
    assert worker.arrived() == set()
    assert worker.get_transfer_results().finished_recving == set()
    worker.nixl_wrapper.states[2] = "DONE"
    assert worker.get_transfer_results().finished_recving == set()
    assert worker.arrived() == {"b"}


def test_a_failure_that_is_found_between_two_steps_is_told_with_the_next_one(worker: Any) -> None:
    worker.nixl_wrapper.states |= {2: "ERR", 3: "DONE"}
    assert worker.arrived() == {"a", "c"}
    results = worker.get_transfer_results()
    assert results.finished_recving == results.failed_recving == {"b"}
    assert worker.get_transfer_results().failed_recving == set()


def test_an_older_workers_failure_is_told_with_a_step_too(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engine import nixl_worker

    def pop(worker: Any, reads: dict[str, list[int]]) -> set[str]:
        """Return what has ended, however it did, as vLLM up to 0.29; what failed is in a queue."""
        states = {r: worker.nixl_wrapper.check_xfer_state(reads[r][0]) for r in list(reads)}
        for request_id in (done := {r for r in states if states[r] != "PROC"}):
            del reads[request_id]
            if states[request_id] == "ERR":
                worker._failed_recv_reqs.put(request_id)
        return done

    def poll(worker: Any) -> Any:
        received = worker._pop_done_transfers(worker._recving_transfers)
        while not worker._failed_recv_reqs.empty():
            received.add(worker._failed_recv_reqs.get_nowait())
        return set(), received

    monkeypatch.setattr(nixl_worker.NixlPullConnectorWorker, "_pop_done_transfers", pop)
    monkeypatch.setattr(nixl_worker.NixlPullConnectorWorker, "get_finished", poll, raising=False)
    del worker._recv_failures
    worker._failed_recv_reqs = queue.Queue()
    worker.nixl_wrapper.states |= {2: "ERR"}
    assert worker.arrived() == {"a"}
    assert worker.get_finished() == (set(), {"b"})


def test_blocks_that_came_after_their_lease_have_not_arrived(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker._leases, "is_late", lambda request_id, now: request_id == "a")
    assert worker.arrived() == set()
    assert worker.get_transfer_results().failed_recving == {"a"}


def test_a_pull_says_what_each_part_of_it_took(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engine.nixl_worker import PullCost

    monkeypatch.setattr("headrace.engine.nixl_worker.time.perf_counter", lambda: 2.0)
    worker.arrived()
    ((request_id, *cost),) = worker.xfer_stats.data["pulls"]
    assert request_id == "a"
    assert PullCost(*cost) == PullCost(0.25, 0.75, 10, 2, 2.0)
    assert worker._posted == {}


@pytest.mark.parametrize(
    ("vllms", "expected"),
    [("Scheduler", "HeadraceScheduler"), ("AsyncScheduler", "HeadraceAsyncScheduler")],
)
def test_the_scheduler_asks_before_it_decides(vllms: str, expected: str) -> None:
    import headrace.engine.vllm_env  # noqa: F401, I001 - first
    from vllm.config import SchedulerConfig

    from headrace.engine import vllm_scheduler
    from headrace.engine.nixl_connector import HeadraceNixlConnector

    order: list[Any] = []

    class Connector(HeadraceNixlConnector):
        def __init__(self) -> None:
            pass

        def arrived(self) -> set[str]:
            order.append("asked")
            return {"a"}

    class Vllms:
        connector = Connector()
        running = waiting = ()

        def _update_from_kv_xfer_finished(self, output: Any) -> None:
            order.append(output.finished_recving)

        def schedule(self, *given: Any) -> Any:
            order.append("decided")
            return given

    class Ours(vllm_scheduler._LooksFirst, Vllms):
        pass

    assert Ours().schedule(True) == (True,)
    assert order == ["asked", {"a"}, "decided"]
    given = SchedulerConfig.default_factory(async_scheduling=vllms == "AsyncScheduler")
    config: Any = SimpleNamespace(scheduler_config=given)
    vllm_scheduler.look_first(config)
    assert given.scheduler_cls == f"headrace.engine.vllm_scheduler.{expected}"
    assert given.get_scheduler_cls().__mro__[1] is vllm_scheduler._LooksFirst
