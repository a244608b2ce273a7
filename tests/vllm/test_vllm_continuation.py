"""An answer that another engine goes on with: token for token what it would have been. Greedy, float32."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from .test_vllm_engine import collect, generate, handoff, prompt, sampling_params, token_ids_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_IDS = 40
LENGTH = 30
"""Of the prompt. A KV block has 32 token IDs, so that the first border lies behind the answer's second one."""

GREEDY: dict[str, Any] = {"max_tokens": NUM_IDS, "ignore_eos": True}


@pytest.mark.parametrize("pulled", [False, True], ids=["prefilled here", "pulled"])
@pytest.mark.parametrize("k", [1, 2, 3, 17, 33, 34, 35, NUM_IDS - 1])
async def test_what_was_emitted_and_its_continuation_are_the_uninterrupted_answer(
    engines: Any, k: int, pulled: bool
) -> None:
    token_ids, params = prompt(LENGTH), sampling_params(**GREEDY)
    whole = token_ids_of(await collect(generate(engines, token_ids, params=params)))
    rest = engines.decode.continuation(params, k)
    again = token_ids + whole[:k]
    kv = await handoff(engines, again) if pulled else None
    salt = None if pulled else "another engine's"  # or the prefix cache would have it
    outputs = await collect(generate(engines, again, kv, params=rest, salt=salt))
    assert whole[:k] + token_ids_of(outputs) == whole
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3},
        {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": list(range(2_000))},
        {"logit_bias": {18: 3.0, 198: -100.0}},
        {"temperature": 0.0, "seed": 5},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_so_are_answers_with_parameters_that_do_not_look_at_the_output_as_such(
    engines: Any, more: dict[str, Any]
) -> None:
    token_ids, params = prompt(LENGTH), sampling_params(**{**GREEDY, **more})
    first = await collect(generate(engines, token_ids, params=params))
    whole = token_ids_of(first)
    for k in (1, len(whole) // 2, len(whole) - 1):
        rest = engines.decode.continuation(params, k)
        again = generate(engines, token_ids + whole[:k], params=rest, salt=f"another engine's {k}")
        outputs = await collect(again)
        assert whole[:k] + token_ids_of(outputs) == whole
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (
            first[-1].finish_reason,
            first[-1].stop_reason,
        )


def params_of(**more: Any) -> bytes:
    from vllm import SamplingParams

    return msgspec.msgpack.encode(SamplingParams(**{**GREEDY, **more}))


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"seed": 1, "temperature": 0.7},
        {"bad_words": ["one"]},
        {"prompt_logprobs": 1},
        {"thinking_token_budget": 5},
        {"extra_args": {"anything": 1}},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_what_looks_at_the_output_as_such_has_no_continuation(
    engines: Any, more: dict[str, Any]
) -> None:
    assert engines.decode.continuation(params_of(temperature=0.0), 1) is not None
    assert engines.decode.continuation(params_of(**{"temperature": 0.0, **more}), 1) is None


async def test_a_grammar_has_no_continuation_and_neither_has_what_is_at_its_end(
    engines: Any,
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    grammar = params_of(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert engines.decode.continuation(grammar, 1) is None
    assert engines.decode.continuation(params_of(), NUM_IDS) is None
