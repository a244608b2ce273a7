"""The log: any part of a stream can be sent again, cut as it was."""

from __future__ import annotations

from headrace.decode.stream_log import StreamLog
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
