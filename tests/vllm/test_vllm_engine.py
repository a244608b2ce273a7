"""A real prefill engine and a real decode engine, with NIXL between them."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from headrace.engine.interface import DecodeOutput
from headrace.engine.priorities import engine_priority
from headrace.shared.errors import BadRequestError, EngineRequestError, HandoffError
from headrace.shared.subjects import Lane

pytestmark = pytest.mark.asyncio(loop_scope="session")

_fresh = itertools.count()


def prompt(length: int = 100) -> list[int]:
    """Return a prompt that no test has used, so that no prefix cache knows it."""
    seed = next(_fresh)
    return [1000 + seed, *((i * 7919 + seed * 104729) % 40000 + 20 for i in range(length - 1))]


def sampling_params(**changes: Any) -> bytes:
    from vllm import SamplingParams

    return msgspec.msgpack.encode(
        SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **changes})
    )


async def handoff(engines: Any, token_ids: list[int]) -> dict[str, Any]:
    result = await engines.prefill.prefill("task", token_ids, cache_salt=None, priority=0)
    kv: dict[str, Any] = result.kv_transfer_params
    return kv


def generate(
    engines: Any,
    token_ids: list[int],
    kv: dict[str, Any] | None = None,
    params: bytes | None = None,
    salt: str | None = None,
    lane: Lane = Lane.RT,
    **more: Any,
) -> Any:
    return engines.decode.generate(
        f"sequence-{next(_fresh)}",
        token_ids,
        params or sampling_params(),
        kv_transfer_params=kv,
        cache_salt=salt,
        priority=engine_priority(lane, 0),
        **more,
    )


async def collect(outputs: Any) -> list[DecodeOutput]:
    return [output async for output in outputs]


def token_ids_of(outputs: list[DecodeOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


async def test_batch_work_that_sits_out_steps_is_answered_as_without_them(engines: Any) -> None:
    """An `rt` request's prompt is computed in steps of its own, and the batch goes on behind them."""
    params = sampling_params(max_tokens=40, ignore_eos=True)
    slow = [prompt(20), prompt(70)]
    quick = [prompt(150), prompt(40), prompt(300)]
    alone = [
        token_ids_of(await collect(generate(engines, ids, params=params, salt="alone")))
        for ids in slow + quick
    ]

    async def interrupted(ids: list[int]) -> list[int]:
        found = []
        async for output in generate(engines, ids, params=params, salt="beside", lane=Lane.BULK):
            found.append(output)
            if ids is slow[0] and len(answers) < 3 and len(found) >= 3 + 6 * len(answers):
                answers.append(asyncio.create_task(urgent(quick[len(answers)])))
        return token_ids_of(found)

    async def urgent(ids: list[int]) -> list[int]:
        return token_ids_of(await collect(generate(engines, ids, params=params, salt="beside")))

    answers: list[asyncio.Task[list[int]]] = []
    batch = await asyncio.gather(*(interrupted(ids) for ids in slow))
    assert [*batch, *[await answer for answer in answers]] == alone


@pytest.mark.parametrize("length", [31, 32, 33, 300])
async def test_a_pulled_prompt_is_answered_token_for_token_as_a_local_one(
    engines: Any, length: int
) -> None:
    token_ids = prompt(length)
    local = await collect(generate(engines, token_ids, salt="apart"))
    before = engines.decode.stats()
    pulled = await collect(generate(engines, token_ids, await handoff(engines, token_ids)))
    after = engines.decode.stats()
    assert token_ids_of(pulled) == token_ids_of(local)
    assert len(token_ids_of(pulled)) == 8
    assert pulled[-1].finish_reason == "length"
    assert after.num_external_cached_token_ids - before.num_external_cached_token_ids == length
    assert after.num_kv_transfers - before.num_kv_transfers == 1
    num_bytes = math.ceil(length / 32) * engines.decode.info.block_bytes
    assert after.kv_transfer_bytes - before.kv_transfer_bytes == num_bytes
    assert pulled[0].kv_transfer_bytes == num_bytes
    assert pulled[0].kv_transfer_s
    assert 0 < pulled[0].kv_post_s < pulled[0].kv_transfer_s
    assert pulled[0].kv_notice_s
    assert pulled[0].num_kv_descriptors
    assert pulled[-1].kv_transfer_bytes is None
    assert pulled[0].num_cached_token_ids == length


async def test_both_engines_have_a_scheduler_that_looks_who_has_arrived(engines: Any) -> None:
    for engine in (engines.prefill, engines.decode):
        config = engine._process.engine.vllm_config.scheduler_config
        assert config.get_scheduler_cls().__name__ in {
            "HeadraceScheduler",
            "HeadraceAsyncScheduler",
        }


async def test_prompts_move_in_few_pieces_also_when_every_block_was_in_use_before(
    engines: Any,
) -> None:
    num_blocks = math.ceil(300 / 32)
    num_prompts = 3 + engines.prefill.info.num_blocks // num_blocks
    pieces = []
    for _ in range(num_prompts):
        token_ids = prompt(300)
        kv = await handoff(engines, token_ids)
        params = sampling_params(max_tokens=1)
        (output,) = await collect(generate(engines, token_ids, kv, params))
        pieces.append(output.num_kv_descriptors)
    # One a layer is the least there can be; one a layer and block, what a prompt's blocks backwards would make.
    assert max(pieces) <= 3 * min(pieces)


async def test_a_prompt_of_one_token_id_is_pulled_too(engines: Any) -> None:
    token_ids = prompt(1)
    local = await collect(generate(engines, token_ids, salt="apart"))
    pulled = await collect(generate(engines, token_ids, await handoff(engines, token_ids)))
    assert token_ids_of(pulled) == token_ids_of(local)
    assert pulled[0].kv_transfer_bytes == engines.decode.info.block_bytes


async def test_sequences_at_once_are_each_told_their_own_pull(engines: Any) -> None:
    prompts = [prompt(40), prompt(200), prompt(400)]
    handoffs = await asyncio.gather(*(handoff(engines, token_ids) for token_ids in prompts))
    answers = await asyncio.gather(
        *(collect(generate(engines, ids, kv)) for ids, kv in zip(prompts, handoffs, strict=True))
    )
    num_blocks = [
        answer[0].kv_transfer_bytes / engines.decode.info.block_bytes
        for answer in answers
        if answer[0].kv_transfer_bytes is not None
    ]
    assert num_blocks == [2, 7, 13]


async def test_a_local_answer_has_no_transfer(engines: Any) -> None:
    outputs = await collect(generate(engines, prompt()))
    assert outputs[0].kv_transfer_s is None
    assert outputs[0].num_cached_token_ids == 0


async def test_a_handoff_names_its_engine_and_when_its_lease_ends(engines: Any) -> None:
    before = time.time()
    result = await engines.prefill.prefill("task", prompt(), cache_salt="salt", priority=0)
    assert before < result.expires - 30 <= time.time()
    assert result.kv_transfer_params["remote_engine_id"] == engines.prefill.info.engine_id
    assert result.num_cached_token_ids == 0
    await engines.decode.release_handoff(result.kv_transfer_params)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_block_ids": None}, "no_blocks"),
        ({"remote_block_ids": []}, "no_blocks"),
        ({"remote_block_ids": [[1]]}, "too_few_blocks"),
        ({"remote_port": None}, "missing_field"),
        ({"remote_num_tokens": 99}, "token_count"),
    ],
)
async def test_a_handoff_that_kills_vllm_is_refused_and_the_engine_serves_on(
    engines: Any, changes: dict[str, Any], reason: str
) -> None:
    token_ids = prompt()
    kv = await handoff(engines, token_ids)
    with pytest.raises(HandoffError) as caught:
        await collect(generate(engines, token_ids, {**kv, **changes}))
    assert caught.value.reason == reason
    assert len(token_ids_of(await collect(generate(engines, token_ids, kv)))) == 8


@pytest.mark.parametrize(
    ("token_ids", "what"),
    [
        ([], "empty"),
        ([49152], "token ID 49152 is outside the vocabulary"),
        ([5, -1], "token ID -1"),
        ([1] * 1024, "max_model_len 1024"),
    ],
)
async def test_bad_token_ids_are_a_bad_request_and_the_engines_serve_on(
    engines: Any, token_ids: list[int], what: str
) -> None:
    with pytest.raises(BadRequestError, match=what):
        await handoff(engines, token_ids)
    with pytest.raises(BadRequestError, match=what):
        await collect(generate(engines, token_ids))
    good = prompt()
    assert await collect(generate(engines, good, await handoff(engines, good)))


@pytest.mark.parametrize(
    ("params", "what"),
    [
        (b"\xc1", "no SamplingParams"),
        (msgspec.msgpack.encode({"max_tokens": "many"}), "no SamplingParams"),
        (msgspec.msgpack.encode({"temperature": -1.0}), "temperature"),
        (msgspec.msgpack.encode({"max_tokens": 1000}), "lower max_tokens"),
        (msgspec.msgpack.encode({"logprobs": 10_000}), "logprobs"),
        (msgspec.msgpack.encode({"stop_token_ids": [10**6]}), "stop_token_ids|vocab"),
        (
            msgspec.msgpack.encode({"structured_outputs": {"json": "{no schema"}}),
            "JSON|json|structured",
        ),
    ],
)
async def test_bad_sampling_params_are_a_bad_request_and_the_engine_serves_on(
    engines: Any, params: bytes, what: str
) -> None:
    with pytest.raises(BadRequestError, match=what):
        await collect(generate(engines, prompt(), params=params))
    assert await collect(generate(engines, prompt()))


async def test_params_for_other_stages_are_taken_out(engines: Any) -> None:
    params = sampling_params(
        n=3,
        stop=["e"],
        prompt_logprobs=1,
        extra_args={"kv_transfer_params": {"do_remote_prefill": True}},
        temperature=1.0,
        seed=1,
    )
    outputs = await collect(generate(engines, prompt(), params=params))
    assert len(token_ids_of(outputs)) == 8


async def test_the_seed_offset_is_added_to_the_seed(engines: Any) -> None:
    token_ids = prompt()

    async def sample(seed: int, seed_offset: int) -> list[int]:
        params = sampling_params(temperature=1.5, seed=seed)
        return token_ids_of(
            await collect(generate(engines, token_ids, params=params, seed_offset=seed_offset))
        )

    assert await sample(5, 2) == await sample(7, 0)
    assert await sample(5, 2) != await sample(5, 0)


async def test_logprobs_have_the_sampled_id_first_with_its_rank(engines: Any) -> None:
    params = sampling_params(logprobs=2, temperature=2.0, seed=3)
    outputs = await collect(generate(engines, prompt(), params=params))
    for output in outputs:
        assert output.logprobs is not None
        assert [entry[0][0] for entry in output.logprobs] == output.token_ids
        assert all(2 <= len(entry) <= 3 for entry in output.logprobs)
        assert all(lp <= 0 and rank for entry in output.logprobs for _, lp, rank in entry)


async def test_a_stop_token_id_is_the_stop_reason(engines: Any) -> None:
    token_ids = prompt()
    third = token_ids_of(await collect(generate(engines, token_ids)))[2]
    params = sampling_params(stop_token_ids=[third], max_tokens=50)
    last = (await collect(generate(engines, token_ids, params=params)))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", third)
    assert last.token_ids[-1] == third


async def test_structured_outputs_hold_in_a_remotely_prefilled_answer(engines: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    token_ids = prompt()
    params = sampling_params(structured_outputs=StructuredOutputsParams(choice=["A"]))
    outputs = await collect(
        generate(engines, token_ids, await handoff(engines, token_ids), params=params)
    )
    assert outputs[-1].finish_reason == "stop"
    assert len(token_ids_of(outputs)) == 2  # "A" and EOS


async def test_a_released_handoff_frees_prefills_blocks(engines: Any, eventually: Any) -> None:
    await eventually(lambda: engines.prefill.stats().num_leases == 0)
    kv = await handoff(engines, prompt(200))
    stats = engines.prefill.stats()
    assert stats.num_leases == 1
    assert stats.num_blocks_free == engines.prefill.info.num_blocks - 7
    await engines.decode.release_handoff(kv)
    await eventually(lambda: engines.prefill.stats().num_leases == 0)
    assert engines.prefill.stats().num_blocks_free == engines.prefill.info.num_blocks


async def test_a_handoff_that_nobody_was_told_of_frees_its_blocks_at_once(
    engines: Any, eventually: Any
) -> None:
    await eventually(lambda: engines.prefill.stats().num_leases == 0)
    num_expired = engines.prefill.stats().num_expired_leases
    kv = await handoff(engines, prompt(200))
    assert engines.prefill.stats().num_blocks_free == engines.prefill.info.num_blocks - 7
    await engines.prefill.drop_lease(kv)
    await eventually(lambda: engines.prefill.stats().num_leases == 0)
    assert engines.prefill.stats().num_blocks_free == engines.prefill.info.num_blocks
    assert engines.prefill.stats().num_expired_leases == num_expired


async def test_a_pull_ends_the_lease(engines: Any, eventually: Any) -> None:
    token_ids = prompt(200)
    await collect(generate(engines, token_ids, await handoff(engines, token_ids)))
    await eventually(lambda: engines.prefill.stats().num_leases == 0)
    assert engines.prefill.stats().num_expired_leases == 0


async def test_closing_the_generator_frees_decodes_blocks(engines: Any, eventually: Any) -> None:
    token_ids = prompt(200)
    kv = await handoff(engines, token_ids)
    params = sampling_params(max_tokens=800, ignore_eos=True)
    outputs = generate(engines, token_ids, kv, params=params)
    await anext(outputs)
    stats = engines.decode.stats()
    assert stats.num_running == 1
    assert stats.num_blocks_free < engines.decode.info.num_blocks
    await outputs.aclose()
    assert engines.decode.stats().num_running == 0
    await eventually(
        lambda: engines.decode.stats().num_blocks_free == engines.decode.info.num_blocks
    )


async def test_cancelling_a_prefill_frees_its_blocks(engines: Any, eventually: Any) -> None:
    await eventually(lambda: engines.prefill.stats().num_leases == 0)
    task = asyncio.create_task(handoff(engines, prompt(1000)))
    await eventually(lambda: engines.prefill.stats().num_running == 1)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert engines.prefill.stats().num_running == 0
    await eventually(
        lambda: engines.prefill.stats().num_blocks_free == engines.prefill.info.num_blocks
    )


async def test_a_prefill_engine_at_a_dead_address_fails_the_contact(engines: Any) -> None:
    from headrace.engine.vllm_start import free_port

    kv = await handoff(engines, [1])
    dead = {**kv, "remote_engine_id": "gone", "remote_port": free_port("127.0.0.1")}
    with pytest.raises(EngineRequestError, match="handshake with prefill engine gone"):
        await engines.decode.warm_handshake(dead)
    await engines.decode.release_handoff(kv)


async def test_the_engines_own_metrics_are_among_those_of_the_process(engines: Any) -> None:
    await collect(generate(engines, prompt()))
    shown = {family.name for family in REGISTRY.collect()}
    assert {"vllm:num_requests_running", "vllm:prefix_cache_queries"} <= shown
