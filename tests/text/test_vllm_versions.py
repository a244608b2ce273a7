"""What an older vLLM lacks, with stand-ins for it; what this one has, as it is."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def versions(_vllm: None) -> Any:
    from headrace.engine import vllm_versions

    return vllm_versions


class OldWorker:
    """A NIXL worker of vLLM 0.26, as far as a failed pull goes."""

    def __init__(self) -> None:
        self.failed: queue.Queue[str] = queue.Queue()

    def _handle_failed_transfer(self, request_id: str, handle: None) -> None:
        self.failed.put(request_id)


class NewWorker:
    """A NIXL worker of vLLM 0.32, as far as a failed pull goes."""

    def __init__(self) -> None:
        self._recv_failures: set[str] = set()
        self.counted: list[bool] = []

    def _handle_failed_transfer(
        self, request_id: str, handle: None, failed: set[str], is_counted: bool
    ) -> None:
        failed.add(request_id)
        self.counted.append(is_counted)


def test_this_vllm_has_every_name(versions: Any) -> None:
    for name in versions._PLACES:
        assert getattr(versions, name) is not versions._Absent


def test_a_name_that_moved_is_found_where_it_was(
    versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (("vllm.nowhere.at_all", "X"), ("vllm.exceptions", "NoSuchError"))
    monkeypatch.setitem(
        versions._PLACES, "x", (*places, ("vllm.exceptions", "VLLMValidationError"))
    )
    assert versions.x.__name__ == "VLLMValidationError"
    monkeypatch.setitem(versions._PLACES, "x", (*places, versions._Absent))
    assert versions.x is versions._Absent
    monkeypatch.setitem(versions._PLACES, "x", places)
    with pytest.raises(ImportError, match="this vLLM has no x"):
        _ = versions.x


def test_an_argument_that_came_later_is_left_out(versions: Any) -> None:
    def old(first: int, *, second: int = 0) -> None: ...

    assert versions.accepted(old, {"first": 1, "second": 2, "third": 3}) == {
        "first": 1,
        "second": 2,
    }


def test_a_sampling_parameter_that_came_later_is_none(versions: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3)
    assert versions.sampling_field(params, "max_tokens") == 3
    assert versions.sampling_field(params, "of_a_later_release") is None


def test_a_request_without_blocks_of_its_own_waits_for_none(versions: Any) -> None:
    assert versions.awaits_kv(SimpleNamespace(local_block_ids=([1, 2],)))
    assert not versions.awaits_kv(SimpleNamespace(local_block_ids=()))
    assert not versions.awaits_kv(SimpleNamespace(local_block_ids=[]))
    marked = SimpleNamespace(local_block_ids=([1],), awaiting_kvs=False)
    assert not versions.awaits_kv(marked)


def test_a_failed_pull_reaches_each_scheduler_in_its_way(versions: Any) -> None:
    old, new = OldWorker(), NewWorker()
    assert versions.popped(old, {"a", "b"}, {"b"}) == {"a", "b"}
    assert old.failed.get_nowait() == "b"
    assert versions.popped(new, {"a", "b"}, {"b"}) == ({"a", "b"}, {"b"})
    versions.fail_pull(new, "c")
    assert new._recv_failures == {"c"}
    assert new.counted == [False]
    assert versions.done_and_failed({"a"}) == ({"a"}, set())
    assert versions.done_and_failed(({"a"}, {"b"})) == ({"a"}, {"b"})


def test_failed_handshakes_are_counted_once(versions: Any) -> None:
    old = SimpleNamespace(data={})
    versions.add_missing_counts(old.data)
    versions.count_failure(old, "handshake_setup_failed")
    versions.count_failure(old, "handshake_failed")
    assert old.data == {versions.FAILED_HANDSHAKES: [1]}
    new = SimpleNamespace(
        data={versions.FAILED_HANDSHAKES: [1]}, record_failed_handshake=lambda: None
    )
    versions.count_failure(new, "handshake_setup_failed")
    assert new.data == {versions.FAILED_HANDSHAKES: [1]}
