"""What real engines answer when NIXL, or a process at its other end, fails: the right text or none, never another.

Everything is shown for both of vLLM's `kv_load_failure_policy`. The answer expected of a prompt is that of an
engine that computes it itself, and the same prompt is asked again afterwards, as a bad pull would stay in decode's
prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.shared.errors import EngineDeadError, HandoffError
from headrace.shared.settings import Settings

from .nixl_bench import (
    LENGTH,
    NUM_TOKEN_IDS,
    Bench,
    answer,
    bench_settings,
    blocks,
    is_free,
    is_pulling,
    prompt,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _bench(engine_settings: Settings) -> AsyncIterator[Bench]:
    bench = Bench(bench_settings(engine_settings))
    try:
        yield bench
    finally:
        await asyncio.gather(*(engine.shutdown() for engine in bench.engines.values()))


@pytest_asyncio.fixture(loop_scope="module")
async def bench(_bench: Bench, eventually: Any) -> AsyncIterator[Bench]:
    """Engines that run and hold nothing, and hold nothing again after the test."""
    await _bench.revive()
    await eventually(lambda: all(map(is_free, _bench.engines.values())))
    yield _bench
    await eventually(lambda: all(map(is_free, _bench.engines.values())))


@pytest_asyncio.fixture(loop_scope="module")
async def asked(bench: Bench) -> AsyncIterator[tuple[list[int], list[int]]]:
    """A prompt and its answer; at the end every decode engine must still give it, from its prefix cache too."""
    token_ids = prompt()
    expected = await answer(bench.decodes["recompute"], token_ids, salt="apart")
    assert isinstance(expected, list)
    assert len(expected) == NUM_TOKEN_IDS
    yield token_ids, expected
    for decode in bench.decodes.values():
        assert await answer(decode, token_ids) == expected


async def lease_ended(bench: Bench, eventually: Any) -> None:
    """Wait until prefill has freed every lease's blocks, and give them to other prompts."""
    await eventually(lambda: is_free(bench.prefill))
    await bench.overwrite()


async def test_decode_goes_on_with_a_restarted_prefill_and_not_with_its_old_handoffs(
    bench: Bench, asked: Any
) -> None:
    token_ids, expected = asked
    other = prompt()
    dead, old = await bench.handoffs(token_ids), await bench.handoffs(other)
    await bench.kill("prefill")
    assert await bench.answers(token_ids, dead) == {"fail": "error", "recompute": expected}
    await bench.revive()  # at the same address
    answers = await bench.answers(other, old)
    assert answers["fail"] == "error"
    assert answers["recompute"] == await answer(bench.decodes["fail"], other)
    fresh = prompt()
    answers = await bench.answers(fresh, await bench.handoffs(fresh))
    assert answers["fail"] == answers["recompute"]
    assert answers["fail"] == await answer(bench.decodes["fail"], fresh, salt="apart")


async def test_a_prefill_killed_in_mid_pull_is_an_error_or_computed_anew(
    bench: Bench, asked: Any, eventually: Any
) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    with bench.stopped("prefill"):
        answers = asyncio.create_task(bench.answers(token_ids, handoffs))
        await eventually(lambda: all(map(is_pulling, bench.decodes.values())))
        await bench.kill("prefill")
        assert await answers == {"fail": "error", "recompute": expected}


async def test_an_ended_lease_is_not_pulled(bench: Bench, asked: Any, eventually: Any) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    await lease_ended(bench, eventually)
    assert await bench.answers(token_ids, handoffs) == {"fail": "error", "recompute": expected}


async def test_a_lease_that_ends_while_decode_stands_still_before_the_pull_is_not_pulled(
    bench: Bench, asked: Any, eventually: Any
) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    with bench.stopped(*bench.decodes):
        answers = asyncio.create_task(bench.answers(token_ids, handoffs))
        await lease_ended_without(bench, eventually)
    assert await answers == {"fail": "error", "recompute": expected}


async def test_a_pull_that_ends_after_its_lease_is_thrown_away(
    bench: Bench, asked: Any, eventually: Any
) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    with contextlib.ExitStack() as decodes:
        with bench.stopped("prefill"):
            answers = asyncio.create_task(bench.answers(token_ids, handoffs))
            await eventually(lambda: all(map(is_pulling, bench.decodes.values())))
            decodes.enter_context(bench.stopped(*bench.decodes))
        await lease_ended_without(bench, eventually)
    assert await answers == {"fail": "error", "recompute": expected}


async def lease_ended_without(bench: Bench, eventually: Any) -> None:
    """As `lease_ended`, while no decode engine can give anything back."""
    await eventually(lambda: is_free(bench.prefill))
    num_other = bench.prefill.stats().num_blocks_free // blocks(LENGTH)
    await asyncio.gather(*(bench.handoff(prompt()) for _ in range(num_other)))


def blocks_beyond(kv: dict[str, Any], bench: Bench) -> dict[str, Any]:
    """Return IDs of blocks that prefill does not have."""
    beyond = bench.prefill.info.num_blocks + 1
    return {"remote_block_ids": [[block + beyond for block in kv["remote_block_ids"][0]]]}


def another_engine(kv: dict[str, Any], bench: Bench) -> dict[str, Any]:
    return {"remote_engine_id": "another"}


@pytest.mark.parametrize("changed", [blocks_beyond, another_engine])
async def test_a_handoff_that_is_not_prefills_own_is_not_pulled_but_can_be_given_back(
    bench: Bench, asked: Any, changed: Any, eventually: Any
) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    wrong = {name: {**kv, **changed(kv, bench)} for name, kv in handoffs.items()}
    assert await bench.answers(token_ids, wrong) == {"fail": "error", "recompute": expected}
    num_expired = bench.prefill.stats().num_expired_leases
    await bench.decodes["fail"].release_handoff(handoffs["fail"])
    await eventually(lambda: bench.prefill.stats().num_leases == 1)
    assert bench.prefill.stats().num_expired_leases == num_expired


async def test_a_handoff_is_pulled_once(bench: Bench, asked: Any) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    again = {name: dict(kv) for name, kv in handoffs.items()}
    assert await bench.answers(token_ids, handoffs) == {"fail": expected, "recompute": expected}
    await bench.overwrite()
    for name, decode in bench.decodes.items():
        with pytest.raises(HandoffError) as caught:
            await answer(decode, token_ids, again[name], salt="apart")
        assert caught.value.reason == "used"


async def test_a_handoff_in_use_is_not_given_back(
    bench: Bench, asked: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    given_back: list[Any] = []
    for decode in bench.decodes.values():
        engine = decode._process.engine
        monkeypatch.setattr(engine, "notify_kv_transfer_request_rejected", given_back.append)
    with bench.stopped("prefill"):
        answers = asyncio.create_task(bench.answers(token_ids, handoffs))
        await eventually(lambda: all(map(is_pulling, bench.decodes.values())))
        for name, decode in bench.decodes.items():
            await decode.release_handoff(handoffs[name])
    assert await answers == {"fail": expected, "recompute": expected}
    assert not given_back


async def test_a_pull_from_a_prefill_that_stands_still_is_given_up_and_harms_nothing_later(
    bench: Bench, asked: Any, eventually: Any
) -> None:
    token_ids, expected = asked
    handoffs = await bench.handoffs(token_ids)
    with bench.stopped("prefill"):
        assert await bench.answers(token_ids, handoffs) == {"fail": "error", "recompute": "error"}
        for decode in bench.decodes.values():
            assert await answer(decode, token_ids) == expected
            assert not is_free(decode)  # prefill may still write
    await eventually(lambda: all(map(is_free, bench.engines.values())))
    other = prompt()
    answers = await bench.answers(other, await bench.handoffs(other))
    assert answers["fail"] == answers["recompute"] == await answer(bench.decodes["fail"], other)


async def test_a_cancel_in_mid_pull_frees_the_blocks_of_both(
    bench: Bench, asked: Any, eventually: Any
) -> None:
    token_ids, _ = asked
    handoffs = await bench.handoffs(token_ids)
    num_expired = bench.prefill.stats().num_expired_leases
    with bench.stopped("prefill"):
        answers = asyncio.create_task(bench.answers(token_ids, handoffs))
        await eventually(lambda: all(map(is_pulling, bench.decodes.values())))
        answers.cancel()
        await asyncio.wait({answers})
    await eventually(lambda: all(map(is_free, bench.engines.values())))
    assert bench.prefill.stats().num_expired_leases == num_expired


async def test_a_cancelled_prefill_that_had_just_ended_leaves_no_lease(
    bench: Bench, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.prefill._process.engine
    generate = engine.generate
    computed = asyncio.Event()

    async def never_heard_of(*args: Any, **kwargs: Any) -> Any:
        async for output in generate(*args, **kwargs):
            computed.set()
            await asyncio.Event().wait()
            yield output

    num_expired = bench.prefill.stats().num_expired_leases
    monkeypatch.setattr(engine, "generate", never_heard_of)
    task = asyncio.create_task(bench.handoff(prompt()))
    await computed.wait()
    assert bench.prefill.stats().num_blocks_free < bench.prefill.info.num_blocks
    task.cancel()
    await asyncio.wait({task})
    monkeypatch.undo()
    await eventually(lambda: is_free(bench.prefill))
    assert bench.prefill.stats().num_expired_leases == num_expired


async def test_a_decode_killed_in_mid_pull_leaves_nothing_in_prefill(
    bench: Bench, asked: Any, eventually: Any
) -> None:
    token_ids, expected = asked
    kv = await bench.handoff(token_ids)
    with bench.stopped("prefill"):
        lost = asyncio.create_task(answer(bench.decodes["fail"], token_ids, kv))
        await eventually(lambda: is_pulling(bench.decodes["fail"]))
        await bench.kill("fail")
        with pytest.raises(EngineDeadError):
            await lost
    await eventually(lambda: is_free(bench.prefill))
    next_owner = bench.engines["recompute"]
    assert await answer(next_owner, token_ids, await bench.handoff(token_ids)) == expected
