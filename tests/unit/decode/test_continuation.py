"""Whether the next owner of a job can go on with its answer, and with what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.decode.continuation import continued, may_continue
from headrace.decode.stream_log import StreamLog
from headrace.engine import fake_text
from headrace.engine.interface import DecodeOutput
from headrace.shared import token_ids
from headrace.shared.messages import Chunk, FinishReason, Job, Prompt, Tokens
from headrace.shared.subjects import Lane


class Engine:
    """Only its rule."""

    continuation = staticmethod(fake_text.continuation)


ENGINE: Any = Engine()


def job(**changes: Any) -> Job:
    prompt = Prompt(
        token_ids=token_ids.pack([1, 2, 3]),
        sampling_params=msgspec.msgpack.encode({"max_tokens": 10, "min_tokens": 3}),
    )
    fields: dict[str, Any] = {"stream": True, "prompts": (prompt,), **changes}
    return Job(
        request_id="r",
        tenant="t",
        model="m",
        lane=Lane.RT,
        endpoint="completions",
        created=0,
        published=0.0,
        deadline=9.0,
        contract="c",
        body=b"{}",
        **fields,
    )


def entry(index: int, *ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(
        stream_id=7, index=index, choice=0, token_ids=token_ids.pack(ids), finish_reason=finish
    )


def chunk(seq: int, *entries: Tokens) -> Chunk:
    return Chunk(request_id="r", seq=seq, chunks=(b"{}",), entries=entries)


def test_the_engine_gets_the_emitted_ids_behind_the_prompt_and_what_is_left_of_the_limits() -> None:
    found = continued(
        job(), [chunk(0, entry(0, 10)), chunk(1, entry(1, 11), entry(2, 12, 13))], ENGINE
    )
    assert found is not None
    assert found.first_seq == 2
    assert found.rest is not None
    (prompt,) = found.rest.prompts
    assert token_ids.unpack(prompt.token_ids) == [1, 2, 3, 10, 11, 12, 13]
    params = fake_text.decode_sampling_params(prompt.sampling_params)
    assert (params.max_tokens, params.min_tokens, params.num_emitted) == (6, 0, 4)


def test_a_log_that_is_preset_with_the_entries_has_the_same_cuts() -> None:
    entries = (entry(0, 10), entry(1, 11, 12), entry(2, 13, finish="stop"))
    log = StreamLog(7)
    log.preset(entries)
    assert tuple(log.entries(0)) == entries
    log.add(0, DecodeOutput(token_ids=[14]))
    assert log.num_token_ids == 5


def test_nothing_is_left_to_generate_behind_a_finish_reason() -> None:
    found = continued(
        job(), [chunk(0, entry(0, 10)), chunk(1, entry(1, 11, finish="stop"))], ENGINE
    )
    assert found is not None
    assert found.rest is None


def test_the_usage_which_nothing_was_fed_for_may_be_the_last_chunk() -> None:
    chunks = [chunk(0, entry(0, 10, finish="length")), chunk(1)]
    found = continued(job(), chunks, ENGINE)
    assert found is not None
    assert (found.first_seq, found.rest) == (2, None)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(0), chunk(1, entry(0, 10))],
        [chunk(1, entry(1, 10))],
        [chunk(0, entry(0, 10)), chunk(2, entry(1, 11))],
        [chunk(0, entry(0, 10)), chunk(1, entry(2, 11))],
        [chunk(0, entry(0, *range(10)))],
        [chunk(0)],
    ],
    ids=["carries no entries", "no beginning", "a hole", "an entry lacks", "nothing left", "none"],
)
def test_chunks_that_do_not_tell_all_can_not_be_continued(chunks: list[Chunk]) -> None:
    assert continued(job(), chunks, ENGINE) is None


def with_params(**params: Any) -> Prompt:
    return Prompt(token_ids=b"\1\0\0\0", sampling_params=msgspec.msgpack.encode(params))


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": False},
        {"n": 2},
        {"prompts": (with_params(), with_params())},
        {"prompts": (with_params(seed=1),)},
        {"prompts": (msgspec.structs.replace(with_params(), prompt_logprobs=1),)},
    ],
    ids=["whole", "choices", "prompts", "seed", "prompt_logprobs"],
)
def test_these_jobs_can_not_be_continued(changes: dict[str, Any]) -> None:
    chunks = [chunk(0, entry(0, 10))]
    assert may_continue(job(), ENGINE)
    assert continued(job(), chunks, ENGINE)
    assert not may_continue(job(**changes), ENGINE)
    assert continued(job(**changes), chunks, ENGINE) is None
