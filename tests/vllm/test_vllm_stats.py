"""What the recorder makes of vLLM's statistics; needs vLLM's types, but no engine."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def recorder() -> Any:
    import headrace.engine.vllm_env  # noqa: F401
    from headrace.engine.vllm_stats import Recorder

    return Recorder(None)


def record(recorder: Any, usage: float = 0.0, **named: Any) -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    from headrace.engine.nixl_worker import HeadraceStats

    stats = HeadraceStats()
    stats.data.update(named)
    recorder.record(
        scheduler_stats=SchedulerStats(kv_cache_usage=usage, kv_connector_stats=stats.data),
        iteration_stats=None,
    )


def test_a_lease_that_ended_before_it_was_known_does_not_stay(recorder: Any) -> None:
    record(recorder, released=["task-0a1b2c3d"])
    recorder.add_lease("task-0a1b2c3d")
    assert recorder.stats(0, 10).num_leases == 0


def test_a_lease_stays_until_its_end_is_told(recorder: Any) -> None:
    recorder.add_lease("task-0a1b2c3d")
    record(recorder, usage=0.5)
    assert recorder.stats(0, 10).num_leases == 1
    assert recorder.stats(0, 10).num_blocks_free == 5
    record(recorder, released=["task-0a1b2c3d"], num_kv_expired_reqs=[1])
    assert recorder.stats(0, 10).num_leases == 0
    assert recorder.stats(0, 10).num_expired_leases == 1


def test_a_resting_engine_has_all_its_blocks_whatever_its_last_step_said(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(recorder, usage=0.5)
    assert recorder.stats(0, 10).num_blocks_free == 5
    monkeypatch.setattr("headrace.engine.vllm_stats.IDLE_S", -1.0)
    assert recorder.stats(1, 10).num_blocks_free == 5
    assert recorder.stats(0, 10).num_blocks_free == 10
    recorder.add_lease("task-0a1b2c3d")
    assert recorder.stats(0, 10).num_blocks_free == 5


def test_a_pull_is_told_once_to_the_sequence_it_was_for(recorder: Any) -> None:
    cost = (0.05, 0.2, 1024, 16, 7.0)
    record(
        recorder,
        pulls=[["job-1-0-0a1b2c3d", *cost]],
        transfer_duration=[0.25],
        bytes_transferred=[1024],
    )
    assert recorder.take_pull("job-1") is None
    assert recorder.take_pull("job-1-0") == cost
    assert recorder.take_pull("job-1-0") is None
    assert recorder.stats(0, 10).kv_transfer_bytes == 1024
    assert recorder.stats(0, 10).num_kv_transfers == 1


def test_two_steps_statistics_add_up() -> None:
    from headrace.engine.nixl_connector import HeadraceNixlConnector
    from headrace.engine.nixl_worker import HeadraceStats

    one, two = HeadraceStats(), HeadraceNixlConnector.build_kv_connector_stats()
    assert one.is_empty()
    one.data["peers"].append("a")
    two.data["released"].append("r")
    assert not one.is_empty()
    assert one.aggregate(two).data["released"] == ["r"]
    assert one.clone_and_reset().data["peers"] == ["a"]
    assert one.is_empty()


def test_a_stalled_pull_is_told_once_to_who_watches_it(recorder: Any) -> None:
    told: list[str] = []
    for sequence_id in ("job-1-0", "job-2-0"):
        recorder.watch_pull(sequence_id, lambda sequence_id=sequence_id: told.append(sequence_id))
    recorder.unwatch_pull("job-2-0")
    stalled = ["job-1-0-0a1b2c3d", "job-2-0-0a1b2c3d", "job-3-0-0a1b2c3d"]
    for _ in range(2):
        record(recorder, stalled=stalled)
    assert told == ["job-1-0"]
