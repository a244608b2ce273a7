"""Logprobs that a task asked for must come with its handoff, and be those of its prompt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.decode import handoff as handoffs
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import EngineInfo
from headrace.shared import token_ids
from headrace.shared.errors import HandoffError
from headrace.shared.messages import Handoff, PrefillTask, PromptLogprobs

INFO = EngineInfo(
    engine_id="d",
    block_size=16,
    num_blocks=8,
    max_model_len=512,
    vocab_size=257,
    block_bytes=1,
    lease_s=30.0,
)
PROMPT = [5, 6, 7]
TASK = PrefillTask(
    task_id="t",
    request_id="r",
    tenant="default",
    decode_instance="decode-1",
    published=1.0,
    expires=9.0,
    contract="c",
    token_ids=token_ids.pack(PROMPT),
    prompt_hash="h",
    prompt_logprobs=2,
)
HANDOFF = Handoff(
    task_id="t",
    request_id="r",
    prefill_instance="prefill-1",
    epoch="e",
    contract="c",
    prompt_hash="h",
    expires=30.0,
    kv_transfer_params={
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "t-1",
        "remote_host": "127.0.0.1",
        "remote_port": 4711,
        "tp_size": 1,
        "remote_num_tokens": 3,
    },
    prefill_queue_s=0.0,
    prefill_s=0.0,
    prompt_logprobs=expected_prompt_logprobs(PROMPT, 2),
)


def check(handoff: Handoff, task: PrefillTask = TASK) -> None:
    handoffs.check(handoff, task, INFO, contract="c", epoch="e", now=2.0, margin_s=1.0)


def test_a_handoff_with_the_logprobs_that_were_asked_for_passes() -> None:
    check(HANDOFF)


def test_no_logprobs_are_needed_where_none_were_asked_for() -> None:
    task: Any = msgspec.structs.replace(TASK, prompt_logprobs=None)
    check(msgspec.structs.replace(HANDOFF, prompt_logprobs=None), task)


@pytest.mark.parametrize(
    "table",
    [None, expected_prompt_logprobs(PROMPT[:-1], 2), expected_prompt_logprobs([5, 6, 8], 2)],
    ids=["none", "too few", "of another prompt"],
)
def test_a_handoff_without_them_is_refused(table: PromptLogprobs | None) -> None:
    with pytest.raises(HandoffError) as caught:
        check(msgspec.structs.replace(HANDOFF, prompt_logprobs=table))
    assert caught.value.reason == "prompt_logprobs"


def test_a_handoff_with_another_tasks_blocks_is_refused() -> None:
    kv = {**HANDOFF.kv_transfer_params, "remote_request_id": "another-1"}
    with pytest.raises(HandoffError) as caught:
        check(msgspec.structs.replace(HANDOFF, kv_transfer_params=kv))
    assert caught.value.reason == "task"


def test_the_blocks_of_any_run_of_the_task_are_its_own() -> None:
    kv = {**HANDOFF.kv_transfer_params, "remote_request_id": "t-0a1b2c3d-1"}
    check(msgspec.structs.replace(HANDOFF, kv_transfer_params=kv))
