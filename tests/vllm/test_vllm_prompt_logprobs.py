"""Logprobs of a prompt from a real prefill engine, while decode pulls the prompt's KV cache all the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.engine.interface import PrefillResult
from headrace.shared import prompt_logprobs as packing
from headrace.shared import token_ids as packed
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import PromptLogprobs

from .test_vllm_engine import collect, generate, prompt, sampling_params, token_ids_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

Rows = list[dict[int, tuple[float, int]]]


async def prefill(engines: Any, token_ids: list[int], asked: int | None) -> PrefillResult:
    result: PrefillResult = await engines.prefill.prefill(
        "task", token_ids, cache_salt=None, priority=0, prompt_logprobs=asked
    )
    return result


async def plain(engines: Any, token_ids: list[int], asked: int) -> Rows:
    """Return what vLLM itself says of a prompt, in its own form, from an engine that computes it whole."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=asked)
    outputs = engines.decode._process.engine.generate(
        tokens_input(token_ids, cache_salt="apart"), params, f"plain-{token_ids[0]}-{asked}"
    )
    last = [output async for output in outputs][-1]
    assert last.prompt_logprobs[0] is None
    return [
        {token_id: (entry.logprob, entry.rank) for token_id, entry in row.items()}
        for row in last.prompt_logprobs[1:]
    ]


def rows_of(table: PromptLogprobs | None, token_ids: list[int]) -> Rows:
    """Return a table in vLLM's form: a likeliest ID that is the prompt's own counts as the likeliest."""
    assert table is not None
    assert packing.problem(table, token_ids) is None
    ids, logprobs = packed.unpack(table.token_ids), packing.unpack_logprobs(table)
    rows: Rows = []
    for number, rank in enumerate(packed.unpack(table.ranks)):
        places = range(number * table.width, (number + 1) * table.width)
        ranks = [rank, *range(1, table.width)]
        rows.append({ids[i]: (logprobs[i], one) for i, one in zip(places, ranks, strict=True)})
    return rows


def same(ours: Rows, theirs: Rows) -> None:
    assert [list(row) for row in ours] == [list(row) for row in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert {i: rank for i, (_, rank) in one.items()} == {i: r for i, (_, r) in two.items()}
        assert {i: lp for i, (lp, _) in one.items()} == pytest.approx(
            {i: lp for i, (lp, _) in two.items()}, abs=1e-4
        )


@pytest.mark.parametrize(("length", "asked"), [(1, 1), (33, 0), (300, 1), (100, 20)])
async def test_prefills_are_those_of_a_plain_engine_and_decode_pulls_the_prompt_all_the_same(
    engines: Any, length: int, asked: int
) -> None:
    token_ids = prompt(length)
    theirs = await plain(engines, token_ids, asked)
    local = await collect(generate(engines, token_ids, salt="other"))
    result = await prefill(engines, token_ids, asked)
    before = engines.decode.stats().num_external_cached_token_ids
    params = sampling_params(prompt_logprobs=asked)  # as the client asked: decode leaves it out
    pulled = await collect(generate(engines, token_ids, result.kv_transfer_params, params=params))
    same(rows_of(result.prompt_logprobs, token_ids), theirs)
    assert pulled[0].kv_transfer_bytes == -(-length // 32) * engines.decode.info.block_bytes
    num_pulled = engines.decode.stats().num_external_cached_token_ids - before
    assert num_pulled == (length if length > 1 else 0)  # vLLM does not count a prompt of one ID
    assert token_ids_of(pulled) == token_ids_of(local)
    assert [output.prompt_logprobs for output in pulled] == [None] * len(pulled)


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_an_engine_that_computes_the_prompt_itself_gives_them_in_its_first_output(
    engines: Any, logprobs: int | None
) -> None:
    token_ids = prompt(70)
    theirs = await plain(engines, token_ids, 2)
    params = sampling_params(logprobs=logprobs)
    outputs = await collect(generate(engines, token_ids, params=params, prompt_logprobs=2))
    same(rows_of(outputs[0].prompt_logprobs, token_ids), theirs)
    assert [output.prompt_logprobs for output in outputs[1:]] == [None] * (len(outputs) - 1)
    without = await collect(generate(engines, token_ids, params=params, salt="apart"))
    assert [row for o in outputs for row in o.logprobs or []] == [
        [(i, pytest.approx(lp, abs=1e-4), rank) for i, lp, rank in row]
        for o in without
        for row in o.logprobs or []
    ]


async def test_a_cached_prompt_is_computed_again_when_its_logprobs_are_asked_for(
    engines: Any,
) -> None:
    token_ids = prompt(200)
    first = await prefill(engines, token_ids, None)
    again = await prefill(engines, token_ids, 1)
    cached = await prefill(engines, token_ids, None)
    assert (first.prompt_logprobs, cached.prompt_logprobs) == (None, None)
    assert (again.num_cached_token_ids, cached.num_cached_token_ids) == (0, 192)
    assert packing.problem(again.prompt_logprobs, token_ids) is None
    for result in (first, again, cached):
        await engines.decode.release_handoff(result.kv_transfer_params)


async def test_the_other_choices_of_a_prompt_find_it_in_the_cache(engines: Any) -> None:
    token_ids = prompt(200)
    await collect(generate(engines, token_ids, prompt_logprobs=1))
    params = sampling_params(prompt_logprobs=1)  # what the client asked for is not this choice's
    outputs = await collect(generate(engines, token_ids, params=params))
    assert outputs[0].num_cached_token_ids == 192
    assert outputs[0].prompt_logprobs is None


@pytest.mark.parametrize("asked", [21, -1, -2])
async def test_more_than_the_engines_limit_is_a_bad_request(engines: Any, asked: int) -> None:
    with pytest.raises(BadRequestError, match="logprobs"):
        await prefill(engines, prompt(), asked)
    with pytest.raises(BadRequestError, match="logprobs"):
        await collect(generate(engines, prompt(), prompt_logprobs=asked))


async def test_logprobs_of_a_prompt_that_is_pulled_are_refused(engines: Any) -> None:
    token_ids = prompt()
    kv = (await prefill(engines, token_ids, None)).kv_transfer_params
    with pytest.raises(BadRequestError, match="prompt_logprobs can't go with kv_transfer_params"):
        await collect(generate(engines, token_ids, kv, prompt_logprobs=1))
    assert await collect(generate(engines, token_ids, kv))


@pytest.mark.parametrize("priority", [-5, 0, 9])
async def test_priority_and_salt_reach_both_engines(
    engines: Any, monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    seen: list[tuple[int, str | None]] = []
    for engine in (engines.prefill, engines.decode):
        core = engine._process.engine
        assert core.vllm_config.scheduler_config.policy == "priority"
        add = core.engine_core.add_request_async

        async def record(request: Any, add: Any = add) -> None:
            seen.append((request.priority, request.cache_salt))
            await add(request)

        monkeypatch.setattr(core.engine_core, "add_request_async", record)
    token_ids = prompt()
    result = await engines.prefill.prefill("task", token_ids, cache_salt="s", priority=priority)
    outputs = engines.decode.generate(
        f"priority-{priority}",
        token_ids,
        sampling_params(),
        kv_transfer_params=result.kv_transfer_params,
        cache_salt="s",
        priority=priority,
    )
    assert len(token_ids_of(await collect(outputs))) == 8
    assert seen == [(priority, "s")] * 2


async def test_prefill_is_asked_for_nothing_but_the_prompt() -> None:
    from vllm import SamplingParams

    from headrace.engine import vllm_params

    def changed(params: SamplingParams) -> dict[str, Any]:
        default = msgspec.to_builtins(SamplingParams())
        given = msgspec.to_builtins(params)
        return {name: value for name, value in given.items() if value != default.get(name)}

    always = {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "output_kind": 2,
        "extra_args": {"kv_transfer_params": {"do_remote_decode": True}},
    }
    assert changed(vllm_params.for_prefill()) == always
    assert changed(vllm_params.for_prefill(3)) == {
        **always,
        "prompt_logprobs": 3,
        "flat_logprobs": True,
        "skip_reading_prefix_cache": True,
    }


@pytest.mark.parametrize("seed", [None, 0, 7])
async def test_decode_gets_what_was_asked_but_for_what_other_stages_do(seed: int | None) -> None:
    from vllm import SamplingParams

    from headrace.engine import vllm_params

    asked = SamplingParams(
        n=3, seed=seed, min_tokens=2, stop=["x"], prompt_logprobs=4, logprobs=1, max_tokens=9
    )
    params = vllm_params.for_decode(msgspec.msgpack.encode(asked), None, 2)
    assert (params.n, params.stop, params.min_tokens, params.logprobs) == (1, [], 2, 1)
    assert params.seed == (None if seed is None else seed + 2)
    assert (params.prompt_logprobs, params.skip_reading_prefix_cache) == (None, False)
    first = vllm_params.for_decode(msgspec.msgpack.encode(asked), None, 0, 4)
    assert (first.prompt_logprobs, first.skip_reading_prefix_cache) == (4, True)
    assert first.seed == seed
