"""One task in, one handoff out: what the task asks for reaches the engine, and comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import EngineInfo, PrefillResult
from headrace.prefill.handler import PrefillHandler
from headrace.shared import token_ids
from headrace.shared.errors import ExpiredError
from headrace.shared.messages import PrefillTask

INFO = EngineInfo(
    engine_id="e",
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
    prompt_hash=token_ids.prompt_hash(token_ids.pack(PROMPT), "salt"),
    cache_salt="salt",
    priority=7,
)


class Recorder:
    """An engine that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    async def prefill(self, *args: Any, **more: Any) -> PrefillResult:
        self.calls.append((args, more))
        return PrefillResult(
            kv_transfer_params={"remote_engine_id": "e"},
            expires=30.0,
            num_cached_token_ids=0,
            prompt_logprobs=expected_prompt_logprobs(PROMPT, more["prompt_logprobs"]),
        )


def handler(engine: Recorder, *, ahead_s: float = 0.0) -> PrefillHandler:
    """A handler whose clock is so far ahead of decode's."""
    return PrefillHandler(
        engine,  # type: ignore[arg-type] - only `prefill` is called
        INFO,
        instance="prefill-1",
        contract="c",
        clock_offset=lambda instance: ahead_s if instance == "decode-1" else 1e6,
        now=lambda: 2.0 + ahead_s,
    )


@pytest.mark.parametrize("asked", [None, 0, 2])
async def test_priority_salt_and_logprobs_of_the_task_reach_the_engine(asked: int | None) -> None:
    engine = Recorder()
    task = msgspec.structs.replace(TASK, prompt_logprobs=asked)
    handoff = await handler(engine).handle(task)
    assert engine.calls == [
        (("t", PROMPT), {"cache_salt": "salt", "priority": 7, "prompt_logprobs": asked})
    ]
    assert handoff.prompt_logprobs == expected_prompt_logprobs(PROMPT, asked)


@pytest.mark.parametrize("ahead_s", [0.0, 60.0, -60.0])
async def test_a_task_expires_by_the_clock_of_the_decode_worker_that_set_it(ahead_s: float) -> None:
    engine = Recorder()
    handoff = await handler(engine, ahead_s=ahead_s).handle(TASK)
    assert handoff.prefill_queue_s == pytest.approx(1.0)
    with pytest.raises(ExpiredError, match=r"expired 0\.5 s ago"):
        await handler(engine, ahead_s=ahead_s).handle(msgspec.structs.replace(TASK, expires=1.5))
    assert len(engine.calls) == 1
