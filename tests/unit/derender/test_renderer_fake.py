"""The fake derenderer: text from bytes, however they were cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.derender.renderer import AnswerStream, Derenderer, build
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.shared import token_ids
from headrace.shared.errors import BadRequestError, EngineRequestError
from headrace.shared.messages import Endpoint, Job, Prompt
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane

TEXT = "Zwölf Mühlen 🎉 stop here"
EOS = 256
AB = [97, 98]


def job(
    *,
    endpoint: Endpoint = "chat.completions",
    body: bytes = b"{}",
    stream: bool = False,
    n: int = 1,
    num_prompts: int = 1,
    **params: object,
) -> Job:
    prompt = Prompt(token_ids=token_ids.pack(AB), sampling_params=msgspec.msgpack.encode(params))
    return Job(
        request_id="r1",
        tenant="t",
        model="m",
        lane=Lane.RT,
        endpoint=endpoint,
        created=7,
        published=0.0,
        deadline=1.0,
        contract="c",
        body=body,
        stream=stream,
        prompts=(prompt,) * num_prompts,
        n=n,
    )


@pytest.fixture
def derenderer() -> Derenderer:
    return build(Settings(), "fake")


def feed_all(answer: AnswerStream, text: str = TEXT, choice: int = 0) -> list[Any]:
    fed = answer.feed(choice, [*text.encode(), EOS], finish_reason="stop")
    return [json.loads(chunk) for chunk in fed.chunks]


def joined(chunks: list[Any], choice: int = 0) -> str:
    deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(delta["delta"].get("content", "") for delta in deltas)


def test_a_whole_chat_has_openais_shape(derenderer: Derenderer) -> None:
    answer = derenderer.open(job())
    assert feed_all(answer) == []
    assert answer.is_finished
    body = json.loads(answer.close().body)
    assert (body["id"], body["object"], body["created"]) == ("chatcmpl-r1", "chat.completion", 7)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == len(TEXT.encode()) + 1


def test_usage_comes_last_and_only_where_it_was_asked_for(derenderer: Derenderer) -> None:
    asked = derenderer.open(job(stream=True, body=b'{"stream_options":{"include_usage":true}}'))
    silent = derenderer.open(job(stream=True))
    feed_all(asked)
    feed_all(silent)
    (last,) = asked.close().chunks
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert silent.close().chunks == ()


@given(cuts=st.lists(st.integers(0, len(TEXT.encode())), max_size=6), stream=st.booleans())
def test_the_same_ids_give_the_same_answer_however_they_were_cut(
    cuts: list[int], stream: bool
) -> None:
    derenderer = build(Settings(), "fake")
    ids = [*TEXT.encode(), EOS]
    whole, cut = (derenderer.open(job(stream=stream, stop=["stop"])) for _ in range(2))
    expected = whole.feed(0, ids, finish_reason="stop")
    borders = [0, *sorted(cuts), len(ids)]
    chunks: list[bytes] = []
    for start, end in pairwise(borders):
        chunks += cut.feed(
            0, ids[start:end], finish_reason="stop" if end == len(ids) else None
        ).chunks
    assert tuple(chunks) == expected.chunks
    assert cut.close() == whole.close()


def test_a_stop_string_across_feeds_is_found_and_cut(derenderer: Derenderer) -> None:
    answer = derenderer.open(job(stream=True, stop=["stop"]))
    first = answer.feed(0, list(b"one st"))
    second = answer.feed(0, list(b"op two"))
    assert not first.stopped
    assert second.stopped
    assert answer.is_finished
    chunks = [json.loads(chunk) for chunk in first.chunks + second.chunks]
    assert joined(chunks) == "one "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "stop"
    assert answer.feed(0, list(b"late")).chunks == ()


def test_a_stop_token_is_no_text(derenderer: Derenderer) -> None:
    answer = derenderer.open(job())
    answer.feed(0, list(b"ab."), finish_reason="stop", stop_reason=ord("."))
    choice = json.loads(answer.close().body)["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("ab", ord("."))


def test_every_choice_of_every_prompt_is_there(derenderer: Derenderer) -> None:
    answer = derenderer.open(job(endpoint="completions", n=2, num_prompts=2))
    for choice in (2, 0, 3, 1):
        assert not answer.is_finished
        feed_all(answer, f"c{choice}", choice)
    body = json.loads(answer.close().body)
    assert [choice["text"] for choice in body["choices"]] == ["c0", "c1", "c2", "c3"]
    assert body["object"] == "text_completion"


def test_streamed_deltas_join_to_the_whole_text(derenderer: Derenderer) -> None:
    assert joined(feed_all(derenderer.open(job(stream=True)))) == TEXT


def test_logprobs_that_were_asked_for_must_come(derenderer: Derenderer) -> None:
    with pytest.raises(EngineRequestError, match="logprobs for each of 1"):
        derenderer.open(job(logprobs=1)).feed(0, [97])


def test_logprobs_stand_beside_their_ids(derenderer: Derenderer) -> None:
    answer = derenderer.open(job(logprobs=0))
    answer.feed(0, [97, EOS], finish_reason="stop", logprobs=[[(97, -0.5, 1)], [(EOS, -1.0, 1)]])
    content = json.loads(answer.close().body)["choices"][0]["logprobs"]["content"]
    assert content == [{"token": "a", "logprob": -0.5}, {"token": "", "logprob": -1.0}]


def test_an_engine_error_is_raised(derenderer: Derenderer) -> None:
    with pytest.raises(EngineRequestError):
        derenderer.open(job()).feed(0, [], finish_reason="error")


def test_a_foreign_choice_is_refused(derenderer: Derenderer) -> None:
    with pytest.raises(BadRequestError, match="choice must be 0 to 0, got 1"):
        derenderer.open(job()).feed(1, [97])


def test_a_job_that_cannot_be_read_is_refused(derenderer: Derenderer) -> None:
    with pytest.raises(BadRequestError, match="can't be read"):
        derenderer.open(job(body=b"{"))


def test_a_prompts_logprobs_stand_beside_each_of_its_choices(derenderer: Derenderer) -> None:
    asked = job(endpoint="completions", n=2)
    prompt = msgspec.structs.replace(asked.prompts[0], prompt_logprobs=1)
    asked = msgspec.structs.replace(asked, prompts=(prompt,))
    answer = derenderer.open(asked)
    with pytest.raises(EngineRequestError, match="did not come"):
        answer.feed(0, [97])
    answer.feed(0, [97], finish_reason="length", prompt_logprobs=expected_prompt_logprobs(AB, 1))
    answer.feed(1, [97], finish_reason="length")
    rows = [c["prompt_logprobs"] for c in json.loads(answer.close().body)["choices"]]
    assert rows[0] == rows[1]
    assert rows[0] == [None, {"0": {"logprob": -0.125}, "98": {"logprob": -4.125}}]
