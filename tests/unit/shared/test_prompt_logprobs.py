"""A prompt's logprobs on the wire: what is packed is read again, and a wrong table is named."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest

from headrace.shared import prompt_logprobs as packing
from headrace.shared import token_ids as packed
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import Tokens

PROMPT = [9, 7, 8]
TABLE = packing.pack([7, 1, 8, 2], [-0.5, -1.5, -math.inf, 0.0], [3, 60_000], num_rows=2)


def test_a_table_has_a_row_for_each_token_id_but_the_first() -> None:
    assert packing.problem(TABLE, PROMPT) is None
    assert (TABLE.width, packing.num_entries(TABLE)) == (2, 4)
    assert packed.unpack(TABLE.token_ids) == [7, 1, 8, 2]
    assert packing.unpack_logprobs(TABLE) == [-0.5, -1.5, -math.inf, 0.0]
    assert packed.unpack(TABLE.ranks) == [3, 60_000]


def test_a_prompt_of_one_token_id_has_an_empty_table() -> None:
    table = packing.pack([], [], [], num_rows=0)
    assert packing.problem(table, [5]) is None
    assert packing.problem(TABLE, [5]) is not None


@pytest.mark.parametrize(
    ("changes", "prompt", "what"),
    [
        (
            {"token_ids": TABLE.token_ids[:-4]},
            PROMPT,
            r"take \[16, 16, 8\] bytes .* got \[12, 16, 8\]",
        ),
        ({"logprobs": b""}, PROMPT, r"got \[16, 0, 8\]"),
        ({"ranks": b""}, PROMPT, r"got \[16, 16, 0\]"),
        ({"width": 0}, PROMPT, r"take \[0, 0, 8\] bytes"),
        ({"width": 0, "token_ids": b"", "logprobs": b""}, PROMPT, r"0 a row"),
        ({"width": -2}, PROMPT, r"take \[-16, -16, 8\] bytes"),
        ({}, [9, 7], r"prompt of 2 token IDs"),
        ({}, [9, 7, 1], "of another prompt"),
    ],
)
def test_a_wrong_table_is_named(changes: dict[str, Any], prompt: list[int], what: str) -> None:
    problem = packing.problem(msgspec.structs.replace(TABLE, **changes), prompt)
    assert problem is not None
    assert re.search(what, problem)


def test_a_missing_table_is_named() -> None:
    assert "did not come" in str(packing.problem(None, PROMPT))


@pytest.mark.parametrize(
    ("lengths", "asked", "num_choices"),
    [([10**6], None, 9), ([400_001], 0, 1), ([20_001, 20_001], 4, 2), ([401], -1, 1)],
)
def test_as_much_as_an_answer_can_carry_passes(
    lengths: list[int], asked: int | None, num_choices: int
) -> None:
    packing.check_size(lengths, asked, num_choices=num_choices, vocab_size=999)


@pytest.mark.parametrize(
    ("lengths", "asked", "num_choices"),
    [([400_002], 0, 1), ([20_001, 20_002], 4, 2), ([402], -1, 1)],
)
def test_more_than_an_answer_can_carry_is_a_bad_request(
    lengths: list[int], asked: int, num_choices: int
) -> None:
    with pytest.raises(BadRequestError, match="at most 400,000") as caught:
        packing.check_size(lengths, asked, num_choices=num_choices, vocab_size=999)
    assert caught.value.param == "prompt_logprobs"


class _OldTokens(msgspec.Struct, frozen=True, array_like=True):
    """`Tokens` as a release without prompts' logprobs has them."""

    stream_id: int
    index: int
    choice: int
    token_ids: bytes
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] | None = None


def test_releases_with_and_without_prompts_logprobs_read_each_others_entries() -> None:
    old = _OldTokens(stream_id=3, index=0, choice=0, token_ids=b"\1\0\0\0")
    new = Tokens(stream_id=3, index=0, choice=0, token_ids=b"\1\0\0\0", prompt_logprobs=TABLE)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Tokens)
    assert (read.token_ids, read.prompt_logprobs) == (old.token_ids, None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=_OldTokens) == old
