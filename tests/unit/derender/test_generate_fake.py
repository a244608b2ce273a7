"""The fake's answer to a `generate` request: token IDs as they came, however they were cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.derender.renderer import build
from headrace.shared.errors import BadRequestError, EngineRequestError
from headrace.shared.messages import Ask
from headrace.shared.settings import Settings

from .test_renderer_fake import job

USAGE = b'{"stream_options": {"include_usage": true}}'


def answer(**fields: Any) -> Any:
    return build(Settings(), "fake").open(job(endpoint="generate", **fields))


def test_a_whole_answer_has_the_token_ids_of_each_choice() -> None:
    whole = answer(n=2)
    whole.feed(0, [1])
    whole.feed(1, [3], finish_reason="length")
    assert not whole.is_finished
    whole.feed(0, [2], finish_reason="stop", stop_reason=2)
    assert whole.is_finished
    assert whole.feed(0, [9]).chunks == ()
    body = json.loads(whole.close().body)
    assert body["request_id"] == "generate-tokens-r1"
    assert [(c["token_ids"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]] == [
        ([1, 2], "stop", 2),
        ([3], "length", None),
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert body["output_mode"] == "tokens"


@pytest.mark.parametrize("feeds", [[[1], [2], [3]], [[1, 2, 3]], [[1], [2, 3]]])
def test_a_streamed_answer_has_a_chunk_a_token_id(feeds: list[list[int]]) -> None:
    streamed = answer(stream=True, body=USAGE)
    chunks: list[bytes] = []
    for index, feed in enumerate(feeds):
        end = {"finish_reason": "stop"} if index == len(feeds) - 1 else {}
        chunks += streamed.feed(0, feed, **end).chunks
    chunks += streamed.close().chunks
    *parts, last = map(json.loads, chunks)
    assert [part["choices"][0]["token_ids"] for part in parts] == [[1], [2], [3]]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


def test_an_end_without_a_token_id_is_a_chunk_of_its_own() -> None:
    streamed = answer(stream=True)
    (chunk,) = streamed.feed(0, [], finish_reason="abort").chunks
    assert json.loads(chunk)["choices"][0]["finish_reason"] == "abort"
    assert streamed.close().chunks == ()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadRequestError, match="choice must be 0 to 0, got 1"):
        answer().feed(1, [1])
    with pytest.raises(EngineRequestError):
        answer().feed(0, [], finish_reason="error")


@pytest.mark.asyncio
async def test_the_fake_derenders_nothing_at_once() -> None:
    ask = Ask(request_id="q", tenant="t", endpoint="completions.derender", deadline=0.0, body=b"{}")
    with pytest.raises(BadRequestError, match="not supported by the fake engine"):
        await build(Settings(), "fake").ask(ask)
