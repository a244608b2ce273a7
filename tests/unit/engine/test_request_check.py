from __future__ import annotations

import pytest

from headrace.engine.interface import EngineInfo
from headrace.engine.request_check import check_prompt
from headrace.shared.errors import BadRequestError

INFO = EngineInfo(
    engine_id="e",
    block_size=16,
    num_blocks=8,
    max_model_len=32,
    vocab_size=100,
    block_bytes=1,
    lease_s=30.0,
)


def test_the_longest_prompt_with_one_token_to_make_passes() -> None:
    check_prompt([0, 99] * 15 + [5], INFO)
    check_prompt([0, 99] * 15 + [5], INFO, max_tokens=None)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "what"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * 32, None, "exceed max_model_len 32"),
        ([1] * 20, 13, "lower max_tokens"),
        ([1, 100], 1, r"token ID 100 is outside the vocabulary \(0 to 99\)"),
        ([1, -1], 1, "token ID -1 is outside"),
    ],
)
def test_a_prompt_that_would_hurt_the_engine_is_a_bad_request(
    token_ids: list[int], max_tokens: int | None, what: str
) -> None:
    with pytest.raises(BadRequestError, match=what):
        check_prompt(token_ids, INFO, max_tokens=max_tokens)
