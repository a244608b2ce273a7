from __future__ import annotations

import msgspec
import pytest

from headrace.engine.fake_text import EOS_TOKEN_ID, decode_sampling_params, expected_output
from headrace.shared.errors import BadRequestError

PROMPT = list(b"What does the river do?")


def test_the_answer_is_printable_words_and_ends() -> None:
    *text, end = expected_output(PROMPT, 500)
    assert end == EOS_TOKEN_ID
    assert bytes(text).decode("ascii").replace(" ", "").isalpha()


def test_prompt_and_seed_decide_the_answer() -> None:
    answers = {
        tuple(expected_output(prompt, 40, seed=seed))
        for prompt in (PROMPT, PROMPT[1:])
        for seed in (None, 1, 2)
    }
    assert len(answers) == 6
    assert expected_output(PROMPT, 40, seed=1) == expected_output(PROMPT, 40, seed=1)


def test_a_shorter_answer_is_the_beginning_of_a_longer_one() -> None:
    assert expected_output(PROMPT, 60, ignore_eos=True)[:7] == expected_output(PROMPT, 7)


def test_min_tokens_and_ignore_eos_keep_it_going() -> None:
    assert EOS_TOKEN_ID not in expected_output(PROMPT, 400, ignore_eos=True)
    assert expected_output(PROMPT, 999, min_tokens=300).index(EOS_TOKEN_ID) >= 300


def test_a_stop_token_id_ends_it() -> None:
    assert expected_output(PROMPT, 400, stop_token_ids=[ord(" ")])[-1] == ord(" ")


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode({"max_tokens": "many"}), b"\x93\x01"]
)
def test_garbage_sampling_params_are_a_bad_request(data: bytes) -> None:
    with pytest.raises(BadRequestError, match="sampling_params"):
        decode_sampling_params(data)


def test_max_tokens_below_one_is_a_bad_request() -> None:
    with pytest.raises(BadRequestError, match="at least 1, got 0"):
        decode_sampling_params(msgspec.msgpack.encode({"max_tokens": 0}))
