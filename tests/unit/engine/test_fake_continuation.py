"""The fake engine goes on with an answer as if it had never been interrupted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.engine.fake_engine import FakeDecodeEngine
from headrace.engine.fake_text import answer, continuation, decode_sampling_params, kv_content
from headrace.shared import settings as settings_module

PROMPT = list(b"What does the river do?")

CASES: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 400},
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 300, "min_tokens": 120},
    {"max_tokens": 300, "min_tokens": 20, "stop_token_ids": [ord(" ")]},
    {"max_tokens": 50, "seed": 3, "temperature": 0.0},
    {"max_tokens": 30, "logprobs": 2},
]


async def generated(
    engine: FakeDecodeEngine, token_ids: list[int], params: bytes
) -> list[tuple[int, str | None]]:
    """Return each token ID with the finish reason that came with it."""
    found: list[tuple[int, str | None]] = []
    outputs = engine.generate(
        "s", token_ids, params, kv_transfer_params=None, cache_salt=None, priority=0
    )
    async for output in outputs:
        found += [(token_id, None) for token_id in output.token_ids]
        if output.finish_reason is not None:
            found[-1] = (found[-1][0], output.finish_reason)
    return found


@pytest.mark.parametrize("given", CASES, ids=str)
async def test_what_was_emitted_and_its_continuation_are_the_uninterrupted_answer(
    given: dict[str, Any],
) -> None:
    settings = settings_module.load(
        env={}, overrides={"fake": {"step_s": 0.0, "prefill_s_per_1k": 0.0}}
    )
    engine = FakeDecodeEngine(settings)
    await engine.start()
    params = msgspec.msgpack.encode(given)
    whole = await generated(engine, PROMPT, params)
    for k in range(1, len(whole)):
        rest = engine.continuation(params, k)
        assert rest is not None
        ids = [token_id for token_id, _ in whole[:k]]
        assert whole[:k] + await generated(engine, PROMPT + ids, rest) == whole
    await engine.shutdown()


def test_a_continuation_can_be_continued() -> None:
    first = continuation(msgspec.msgpack.encode({"max_tokens": 30}), 5)
    assert first is not None
    second = continuation(first, 5)
    assert second == continuation(msgspec.msgpack.encode({"max_tokens": 30}), 10)
    assert second is not None
    content, whole = kv_content(PROMPT), decode_sampling_params(b"\x81\xaamax_tokens\x1e")
    rest = list(answer(content, decode_sampling_params(second), 20))
    assert rest == list(answer(content, whole, 30))[10:]


@pytest.mark.parametrize(
    ("given", "num_emitted"),
    [({"seed": 1}, 1), ({"max_tokens": 10}, 10)],
    ids=["a seed", "nothing is left"],
)
def test_where_it_is_not_exact_there_is_none(given: dict[str, Any], num_emitted: int) -> None:
    assert continuation(msgspec.msgpack.encode(given), num_emitted) is None
