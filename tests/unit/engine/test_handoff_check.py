from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.handoff_check import check_kv_transfer_params, check_origin
from headrace.shared.errors import HandoffError

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 9]],
    "remote_engine_id": "engine",
    "remote_request_id": "task-0a1b2c3d",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 40,
}


def check(**changes: Any) -> None:
    check_kv_transfer_params({**GOOD, **changes}, num_prompt_token_ids=40, block_size=16)


def test_a_good_handoff_passes() -> None:
    check()
    check(remote_num_tokens=None)
    check_origin(GOOD)


def test_a_second_group_with_a_sliding_window_may_have_fewer_blocks() -> None:
    check(remote_block_ids=[[1], [2, 3, 4]])


@pytest.mark.parametrize("num_token_ids", [33, 48])
def test_a_partly_filled_last_block_counts(num_token_ids: int) -> None:
    kv = {**GOOD, "remote_num_tokens": num_token_ids}
    check_kv_transfer_params(kv, num_prompt_token_ids=num_token_ids, block_size=16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_remote_prefill": False}, "not_remote_prefill"),
        ({"do_remote_prefill": None}, "not_remote_prefill"),
        ({"do_remote_prefill": "yes"}, "not_remote_prefill"),
        ({"remote_engine_id": None}, "missing_field"),
        ({"remote_request_id": ""}, "missing_field"),
        ({"remote_host": None}, "missing_field"),
        ({"remote_port": None}, "missing_field"),
        ({"tp_size": None}, "missing_field"),
        ({"remote_port": "5600"}, "bad_field"),
        ({"remote_port": True}, "bad_field"),
        ({"remote_port": 70000}, "bad_field"),
        ({"tp_size": 0}, "bad_field"),
        ({"remote_host": b"127.0.0.1"}, "bad_field"),
        ({"remote_block_ids": None}, "no_blocks"),
        ({"remote_block_ids": []}, "no_blocks"),
        ({"remote_block_ids": [[]]}, "no_blocks"),
        ({"remote_block_ids": [[1, 2, 3], []]}, "no_blocks"),
        ({"remote_block_ids": [1, 2, 3]}, "bad_block_ids"),
        ({"remote_block_ids": "abc"}, "bad_block_ids"),
        ({"remote_block_ids": [[1, -2, 3]]}, "bad_block_ids"),
        ({"remote_block_ids": [[1, None, 3]]}, "bad_block_ids"),
        ({"remote_block_ids": [[1, 2]]}, "too_few_blocks"),
        ({"remote_block_ids": [[1, 2, 3, 4]]}, "too_many_blocks"),
        ({"remote_num_tokens": 39}, "token_count"),
    ],
)
def test_a_bad_handoff_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(HandoffError, match="before the engine") as caught:
        check(**changes)
    assert caught.value.reason == reason
