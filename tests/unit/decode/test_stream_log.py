"""The log: any part of a stream can be sent again, cut as it was."""

from __future__ import annotations

import pytest

from headrace.decode.stream_log import MAX_MERGED, StreamLog
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import DecodeOutput
from headrace.shared import token_ids


def test_entries_are_numbered_and_keep_their_cuts() -> None:
    log = StreamLog(5)
    log.add(0, DecodeOutput(token_ids=[1, 2]))
    log.add(1, DecodeOutput(token_ids=[3], logprobs=[[(3, -0.5, 1)]]))
    log.add(0, DecodeOutput(token_ids=[4], finish_reason="stop", stop_reason=4))
    entries = list(log.entries(0))
    assert [(e.index, e.choice, token_ids.unpack(e.token_ids)) for e in entries] == [
        (0, 0, [1, 2]),
        (1, 1, [3]),
        (2, 0, [4]),
    ]
    assert entries[1].logprobs == [[(3, -0.5, 1)]]
    assert (entries[2].finish_reason, entries[2].stop_reason) == ("stop", 4)
    assert list(log.entries(1)) == entries[1:]
    assert list(log.entries(3)) == []
    assert log.num_token_ids == 4


def test_a_prompts_logprobs_are_sent_again_with_their_entry() -> None:
    table = expected_prompt_logprobs([1, 2, 3], 2)
    log = StreamLog(5)
    log.add(0, DecodeOutput(token_ids=[1], prompt_logprobs=table))
    log.add(0, DecodeOutput(token_ids=[2]))
    for _ in range(2):
        assert [entry.prompt_logprobs for entry in log.entries(0)] == [table, None]
    assert [entry.prompt_logprobs for entry in log.entries(1)] == [None]


def cuts(log: StreamLog) -> list[list[int]]:
    return [token_ids.unpack(entry.token_ids) for entry in log.entries(0)]


def test_steps_that_nobody_was_given_yet_are_one_entry() -> None:
    log = StreamLog(5)
    log.add(0, DecodeOutput(token_ids=[1]))
    log.add(0, DecodeOutput(token_ids=[2]))
    log.add(0, DecodeOutput(token_ids=[3], finish_reason="stop", stop_reason=3))
    assert len(log) == 1
    (entry,) = log.entries(0)
    assert token_ids.unpack(entry.token_ids) == [1, 2, 3]
    assert (entry.finish_reason, entry.stop_reason) == ("stop", 3)


def test_an_entry_that_was_given_stays_as_it_is() -> None:
    log = StreamLog(5)
    log.add(0, DecodeOutput(token_ids=[1]))
    given = list(log.entries(0))
    log.add(0, DecodeOutput(token_ids=[2]))
    log.add(0, DecodeOutput(token_ids=[3]))
    assert list(log.entries(0))[:1] == given
    assert cuts(log) == [[1], [2, 3]]
    log.add(0, DecodeOutput(token_ids=[4]))
    assert cuts(log) == [[1], [2, 3], [4]]


def test_choices_have_entries_of_their_own() -> None:
    log = StreamLog(5)
    log.add(0, DecodeOutput(token_ids=[1]))
    log.add(1, DecodeOutput(token_ids=[2]))
    assert [(entry.choice, token_ids.unpack(entry.token_ids)) for entry in log.entries(0)] == [
        (0, [1]),
        (1, [2]),
    ]


def test_an_entry_has_a_limited_number_of_token_ids() -> None:
    log = StreamLog(5)
    for token_id in range(MAX_MERGED + 1):
        log.add(0, DecodeOutput(token_ids=[token_id]))
    assert [len(ids) for ids in cuts(log)] == [MAX_MERGED, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (DecodeOutput(token_ids=[1]), DecodeOutput(token_ids=[2], logprobs=[[(2, -0.5, 1)]])),
        (DecodeOutput(token_ids=[1], logprobs=[[(1, -0.5, 1)]]), DecodeOutput(token_ids=[2])),
        (DecodeOutput(token_ids=[1], finish_reason="stop"), DecodeOutput(token_ids=[2])),
    ],
)
def test_logprobs_and_ends_stay_with_their_own_step(
    first: DecodeOutput, second: DecodeOutput
) -> None:
    log = StreamLog(5)
    log.add(0, first)
    log.add(0, second)
    assert cuts(log) == [[1], [2]]


def test_what_another_worker_began_with_keeps_its_cuts() -> None:
    log = StreamLog(5)
    for token_id in (1, 2):
        log.add(0, DecodeOutput(token_ids=[token_id]))
        list(log.entries(0))
    after = StreamLog(6)
    after.preset(log.entries(0))
    after.add(0, DecodeOutput(token_ids=[3]))
    assert cuts(after) == [[1], [2], [3]]
