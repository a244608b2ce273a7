"""The fake engine: right answers, and vLLM's ways of going wrong. Waits on events, never on a clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headrace.engine.fake_engine import (
    FakeDecodeEngine,
    FakePrefillEngine,
    FaultPlan,
    expected_output,
)
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import DecodeOutput
from headrace.shared import prompt_logprobs
from headrace.shared.errors import (
    BadRequestError,
    EngineDeadError,
    EngineRequestError,
    HandoffError,
)
from headrace.shared.settings import (
    DecodeSettings,
    FakeSettings,
    ModelSettings,
    NixlSettings,
    Settings,
)

SETTINGS = Settings(
    model=ModelSettings(block_size=16),
    nixl=NixlSettings(lease_s=30.0),
    fake=FakeSettings(step_s=0.0, prefill_s_per_1k=0.0, num_blocks=8, max_model_len=512),
)
PROMPT = list(b"What does the river do at night?!")  # 33 token IDs: 3 blocks
OTHER = list(b"What does the otter do at night?!")


@pytest.fixture
async def prefill() -> AsyncIterator[FakePrefillEngine]:
    engine = FakePrefillEngine(SETTINGS)
    await engine.start()
    yield engine
    await engine.shutdown()


@pytest.fixture
async def decode() -> AsyncIterator[FakeDecodeEngine]:
    engine = FakeDecodeEngine(SETTINGS)
    await engine.start()
    yield engine
    await engine.shutdown()


async def handoff(engine: FakePrefillEngine, token_ids: list[int] = PROMPT) -> dict[str, Any]:
    result = await engine.prefill("task", token_ids, cache_salt=None, priority=0)
    return result.kv_transfer_params


def generate(
    engine: FakeDecodeEngine,
    kv: dict[str, Any] | None = None,
    token_ids: list[int] = PROMPT,
    seed_offset: int = 0,
    prompt_logprobs_asked: int | None = None,
    **sampling_params: Any,
) -> Any:
    return engine.generate(
        "sequence",
        token_ids,
        msgspec.msgpack.encode({"max_tokens": 200, **sampling_params}),
        kv_transfer_params=kv,
        cache_salt=None,
        priority=0,
        seed_offset=seed_offset,
        prompt_logprobs=prompt_logprobs_asked,
    )


async def collect(outputs: Any) -> tuple[list[int], DecodeOutput]:
    token_ids: list[int] = []
    last = None
    async for last in outputs:
        token_ids += last.token_ids
    assert last is not None
    return token_ids, last


async def test_a_local_answer_is_the_expected_one(decode: FakeDecodeEngine) -> None:
    token_ids, last = await collect(generate(decode))
    assert token_ids == expected_output(PROMPT, 200)
    assert last.finish_reason == "stop"
    assert decode.stats().num_blocks_free == 8
    assert decode.stats().num_running == 0


async def test_max_tokens_ends_it_with_length(decode: FakeDecodeEngine) -> None:
    token_ids, last = await collect(generate(decode, max_tokens=5))
    assert len(token_ids) == 5
    assert last.finish_reason == "length"


async def test_the_seed_offset_counts_as_a_seed_of_its_own(decode: FakeDecodeEngine) -> None:
    token_ids, _ = await collect(generate(decode, seed=3, seed_offset=2))
    assert token_ids == expected_output(PROMPT, 200, seed=5)


async def test_logprobs_come_with_the_sampled_id_first(decode: FakeDecodeEngine) -> None:
    _, last = await collect(generate(decode, logprobs=3, max_tokens=4))
    assert last.logprobs is not None
    assert [entry[0][0] for entry in last.logprobs] == last.token_ids
    assert all(len(entry) == 3 for entry in last.logprobs)


@pytest.mark.parametrize("asked", [None, 0, 3, -1])
async def test_both_engines_give_a_prompt_the_same_logprobs(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine, asked: int | None
) -> None:
    result = await prefill.prefill(
        "task", PROMPT, cache_salt=None, priority=0, prompt_logprobs=asked
    )
    outputs = [o async for o in generate(decode, prompt_logprobs_asked=asked)]
    expected = expected_prompt_logprobs(PROMPT, asked)
    assert result.prompt_logprobs == expected
    assert [output.prompt_logprobs for output in outputs] == [expected] + [None] * (
        len(outputs) - 1
    )
    if asked is not None:
        assert prompt_logprobs.problem(expected, PROMPT) is None


async def test_logprobs_of_a_prompt_that_is_pulled_are_refused(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    with pytest.raises(BadRequestError, match="prompt_logprobs can't go with kv_transfer_params"):
        await collect(generate(decode, kv, prompt_logprobs_asked=1))


async def test_a_pulled_prompt_gives_the_same_answer_and_frees_its_blocks(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    assert prefill.stats().num_blocks_free == 5
    assert prefill.stats().num_leases == 1
    outputs = [output async for output in generate(decode, kv)]
    assert [i for o in outputs for i in o.token_ids] == expected_output(PROMPT, 200)
    assert outputs[0].num_cached_token_ids == len(PROMPT)
    assert outputs[0].kv_transfer_bytes == 3 * 4096
    assert outputs[0].num_kv_descriptors == 3
    assert outputs[-1].kv_transfer_s is None
    assert decode.stats().num_external_cached_token_ids == len(PROMPT)
    assert decode.stats().num_local_computed_token_ids == 0
    assert prefill.stats().num_blocks_free == 8


async def test_a_used_handoff_gives_a_wrong_answer_with_a_normal_end(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    await collect(generate(decode, kv))
    token_ids, last = await collect(generate(decode, kv))
    assert last.finish_reason == "stop"
    assert token_ids != expected_output(PROMPT, 200)


async def test_an_expired_handoff_gives_a_wrong_answer_with_a_normal_end(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    prefill.expire_leases()
    assert prefill.stats().num_expired_leases == 1
    assert prefill.stats().num_blocks_free == 8
    token_ids, last = await collect(generate(decode, kv))
    assert last.finish_reason == "stop"
    assert token_ids != expected_output(PROMPT, 200)


async def test_a_lease_runs_out_by_itself(decode: FakeDecodeEngine) -> None:
    engine = FakePrefillEngine(msgspec.structs.replace(SETTINGS, nixl=NixlSettings(lease_s=1e-3)))
    await engine.start()
    await handoff(engine)
    await engine.wait_until(lambda stats: stats.num_leases == 0)
    assert engine.stats().num_expired_leases == 1
    await engine.shutdown()


async def test_a_handoff_of_another_prompt_answers_the_other_question(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill, OTHER)
    token_ids, _ = await collect(generate(decode, kv))
    assert token_ids == expected_output(OTHER, 200)


async def test_a_handoff_of_another_engine_on_the_same_port_is_an_error(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = {**await handoff(prefill), "remote_engine_id": "one that was here before"}
    token_ids, last = await collect(generate(decode, kv))
    assert (token_ids, last.finish_reason) == ([], "error")


async def test_a_dead_prefill_engine_is_an_error_at_once(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    prefill.die()
    token_ids, last = await collect(generate(decode, kv))
    assert (token_ids, last.finish_reason) == ([], "error")
    assert decode.stats().num_failed_kv_transfers == 1
    await decode.release_handoff(kv)


async def test_a_cut_connection_is_an_error(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    prefill.faults.drop_pulls = True
    assert (await collect(generate(decode, kv)))[1].finish_reason == "error"


async def test_a_hung_prefill_engine_is_waited_for_until_the_sequence_is_aborted(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    prefill.faults.hang_pulls = True
    waiting = asyncio.create_task(collect(generate(decode, kv)))
    await decode.wait_until(lambda stats: stats.num_blocks_free == 5)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert decode.stats().num_blocks_free == 8


async def test_a_pull_from_a_hung_prefill_engine_ends_as_a_failed_one(
    prefill: FakePrefillEngine,
) -> None:
    decode = FakeDecodeEngine(
        msgspec.structs.replace(SETTINGS, decode=DecodeSettings(pull_timeout_s=0.01))
    )
    await decode.start()
    kv = await handoff(prefill)
    prefill.faults.hang_pulls = True
    assert (await collect(generate(decode, kv)))[1].finish_reason == "error"
    await decode.shutdown()


async def test_a_lease_is_kept_while_decode_waits_for_blocks_of_its_own(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    decode.faults.hold = True
    first = [asyncio.create_task(collect(generate(decode, token_ids=OTHER))) for _ in range(2)]
    await decode.wait_until(lambda stats: stats.num_blocks_free == 2)
    kv = await handoff(prefill)
    late = asyncio.create_task(collect(generate(decode, kv)))
    await decode.wait_until(lambda stats: stats.num_running == 3)
    await prefill.wait_until(lambda stats: prefill.num_held_leases == 1)
    prefill.expire_leases()
    decode.release()
    assert (await late)[0] == expected_output(PROMPT, 200)
    await asyncio.gather(*first)


async def test_an_abort_before_the_pull_gives_the_blocks_back(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    decode.faults.hold = True
    first = [asyncio.create_task(collect(generate(decode, token_ids=OTHER))) for _ in range(2)]
    await decode.wait_until(lambda stats: stats.num_blocks_free == 2)
    late = asyncio.create_task(collect(generate(decode, await handoff(prefill))))
    await prefill.wait_until(lambda stats: prefill.num_held_leases == 1)
    late.cancel()
    await prefill.wait_until(lambda stats: stats.num_leases == 0)
    decode.release()
    await asyncio.gather(*first)
    assert decode.stats().num_blocks_free == 8


async def test_a_released_handoff_frees_its_blocks(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    await decode.release_handoff(await handoff(prefill))
    assert prefill.stats().num_leases == 0
    assert prefill.stats().num_blocks_free == 8
    await decode.warm_handshake(await handoff(prefill))
    assert prefill.stats().num_leases == 0


async def test_warming_up_with_a_dead_prefill_engine_is_an_error(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    prefill.die()
    with pytest.raises(EngineRequestError, match="no contact"):
        await decode.warm_handshake(kv)


async def test_closing_the_generator_frees_the_blocks(decode: FakeDecodeEngine) -> None:
    outputs = generate(decode, ignore_eos=True)
    await anext(outputs)
    assert decode.stats().num_running == 1
    await outputs.aclose()
    assert decode.stats().num_running == 0
    assert decode.stats().num_blocks_free == 8


async def test_cancelling_a_prefill_frees_its_blocks(prefill: FakePrefillEngine) -> None:
    prefill.faults.hold = True
    task = asyncio.create_task(handoff(prefill))
    await prefill.wait_until(lambda stats: stats.num_blocks_free == 5)
    task.cancel()
    await asyncio.wait({task})
    assert prefill.stats().num_blocks_free == 8
    assert prefill.stats().num_running == 0


async def test_a_full_pool_makes_the_next_prefill_wait_for_a_lease_to_end(
    prefill: FakePrefillEngine,
) -> None:
    await handoff(prefill)
    await handoff(prefill)
    waiting = asyncio.create_task(handoff(prefill))
    await prefill.wait_until(lambda stats: stats.num_running == 1)
    assert not waiting.done()
    prefill.expire_leases()
    assert await waiting
    assert prefill.stats().num_blocks_free == 5


async def test_a_prompt_larger_than_the_pool_fails_alone(prefill: FakePrefillEngine) -> None:
    with pytest.raises(EngineRequestError, match="needs 9 KV blocks, the engine has 8"):
        await handoff(prefill, [1] * 129)
    assert await handoff(prefill)


@pytest.mark.parametrize("token_ids", [[], [257], [-1], [1] * 512])
async def test_bad_token_ids_are_a_bad_request(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine, token_ids: list[int]
) -> None:
    with pytest.raises(BadRequestError):
        await handoff(prefill, token_ids)
    with pytest.raises(BadRequestError):
        await collect(generate(decode, token_ids=token_ids, max_tokens=None))


async def test_a_handoff_that_would_kill_vllm_is_refused(
    prefill: FakePrefillEngine, decode: FakeDecodeEngine
) -> None:
    kv = await handoff(prefill)
    with pytest.raises(HandoffError, match="blocks for 33 token IDs") as caught:
        await collect(generate(decode, {**kv, "remote_block_ids": [[0]]}))
    assert caught.value.reason == "too_few_blocks"


async def test_a_planned_failure_hits_one_request(decode: FakeDecodeEngine) -> None:
    decode.faults.fail_next = 1
    with pytest.raises(EngineRequestError, match="injected"):
        await collect(generate(decode))
    assert (await collect(generate(decode)))[0] == expected_output(PROMPT, 200)


async def test_death_ends_every_request_and_every_later_one() -> None:
    decode = FakeDecodeEngine(SETTINGS, FaultPlan(die_after_token_ids=4))
    await decode.start()
    await decode.check_health()
    results = await asyncio.gather(
        collect(generate(decode, ignore_eos=True)),
        collect(generate(decode, ignore_eos=True)),
        collect(generate(decode, ignore_eos=True)),  # has no blocks, waits
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [EngineDeadError] * 3
    with pytest.raises(EngineDeadError):
        await decode.check_health()
    with pytest.raises(EngineDeadError):
        await collect(generate(decode))
    await decode.shutdown()


async def test_an_engine_that_was_not_started_is_a_dead_one() -> None:
    engine = FakePrefillEngine(SETTINGS)
    with pytest.raises(EngineDeadError, match="not started"):
        await handoff(engine)
    await engine.shutdown()


async def test_leases_that_expire_early_promise_their_whole_time() -> None:
    engine = FakePrefillEngine(SETTINGS, FaultPlan(expire_early=True))
    await engine.start()
    await handoff(engine)
    assert engine.stats().num_blocks_free == 8
    await engine.shutdown()


@pytest.mark.parametrize("has_output", [False, True])
async def test_a_death_ends_what_runs_whether_it_waits_or_has_an_output(has_output: bool) -> None:
    """In a step that takes longer than the test, or behind the last one, unread."""
    fake = msgspec.structs.replace(SETTINGS.fake, step_s=0.0 if has_output else 3_600.0)
    engine = FakeDecodeEngine(msgspec.structs.replace(SETTINGS, fake=fake))
    await engine.start()
    outputs = generate(engine, ignore_eos=True, max_tokens=3)
    waiting = asyncio.ensure_future(anext(outputs))
    async with asyncio.timeout(20):
        if has_output:
            await waiting
            await engine.wait_until(lambda stats: stats.num_steps == 4)  # the prompt's, and all 3
            waiting = asyncio.ensure_future(anext(outputs))
        else:
            await engine.wait_until(lambda stats: stats.num_local_computed_token_ids > 0)
            await asyncio.sleep(0)  # now it waits for its first step
        engine.die()
        with pytest.raises(EngineDeadError):
            await waiting
    await engine.shutdown()
