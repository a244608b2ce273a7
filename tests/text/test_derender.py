"""Derender against vLLM's own server: the same IDs give the same message, however they came."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.derender.renderer import AnswerStream, Closed, Derenderer
from headrace.shared.errors import BadRequestError, EngineRequestError
from headrace.shared.messages import Job

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MakeJob = Callable[..., Job]

EOS = 2
USER = [{"role": "user", "content": "hi"}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = "Paris is très nice 🎉👩‍🚀, isn't it?"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]}
THINKING = "<think>\nThe user says hi.\n</think>\n\nHello there!"
CALLING = (
    "<think>\nlook it up\n</think>\n\nOne moment."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
ANSWERS = {
    "plain": (TEXT, {}),
    "reasoning": (THINKING, {}),
    "hidden reasoning": (THINKING, {"include_reasoning": False}),
    "no thinking": ("Hello!", {"chat_template_kwargs": {"enable_thinking": False}}),
    "tools": (CALLING, TOOLS),
    "one tool": (CALLING, {**TOOLS, "parallel_tool_calls": False}),
    "unused tools": (THINKING, TOOLS),
    "special tokens": (f"<|im_start|>{TEXT}", {"skip_special_tokens": False}),
}


@dataclass
class Got:
    """All that an answer gave."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    closed: Closed = field(default_factory=Closed)

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.json.decode(self.closed.body)
        return body


@pytest.fixture(scope="module")
def ids_of(stack: Any) -> Callable[[str], list[int]]:
    tokenizer = stack.renderer.get_tokenizer()
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def play(answer: AnswerStream, *choices: list[list[int]], **last: Any) -> Got:
    """Feed each choice its feeds; the last feed ends it."""
    got = Got()
    end = {"finish_reason": "stop", **last}
    for choice, feeds in enumerate(choices):
        for index, feed in enumerate(feeds):
            fed = answer.feed(choice, list(feed), **(end if index == len(feeds) - 1 else {}))
            got.raw += fed.chunks
            got.stopped.append(fed.stopped)
    assert answer.is_finished
    got.closed = answer.close()
    got.raw += got.closed.chunks
    got.chunks = [json.loads(chunk) for chunk in got.raw]
    return got


def cut(ids: list[int], borders: list[int]) -> list[list[int]]:
    """Return `ids` in pieces; the last one is never empty, as the finish reason belongs to its ID."""
    marks = [0, *sorted(border % len(ids) for border in borders), len(ids)]
    return [ids[start:end] for start, end in pairwise(marks)]


def join(chunks: list[dict[str, Any]], choice: int = 0) -> dict[str, Any]:
    """Return the message that a client puts together from the chunks of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for part in (c for chunk in chunks for c in chunk["choices"] if c["index"] == choice):
        delta = part["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            calls = message["tool_calls"]
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
        message["finish_reason"] = part["finish_reason"]
    return message


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer's choice in the form of `join`."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "tool_calls": [
            {"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()
        ],
        "finish_reason": choice["finish_reason"],
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"name": call["name"], "arguments": json.loads(call["arguments"])}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_whole_answer_is_what_vllms_server_makes_of_the_same_ids(
    answer: str,
    parsing_derenderer: Derenderer,
    parsing_stack: Any,
    reference: Any,
    make_parsing_job: MakeJob,
    ids_of: Callable[[str], list[int]],
) -> None:
    text, more = ANSWERS[answer]
    ids = [*ids_of(text), EOS]
    body = {"messages": USER, **more}
    theirs = asyncio.run(reference.Reference(parsing_stack, ids).chat(body)).model_dump(mode="json")
    ours = play(parsing_derenderer.open(make_parsing_job(body)), [[one] for one in ids]).body
    assert without_ids(flat(ours["choices"][0])) == without_ids(flat(theirs["choices"][0]))
    for key in {"prompt_tokens", "completion_tokens", "completion_tokens_details"} & theirs[
        "usage"
    ].keys():
        assert ours["usage"][key] == theirs["usage"][key]
    same = theirs.keys() - {"id", "created", "choices", "usage", "system_fingerprint"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert (ours["id"], ours["created"]) == ("chatcmpl-r1", 1_700_000_000)


@pytest.mark.parametrize(
    "more",
    [
        TOOLS,
        {**TOOLS, "tool_choice": "required"},
        {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["auto", "required", "named", "json"],
)
def test_parsers_see_the_request_as_rendering_left_it(
    more: dict[str, Any],
    parsing_derenderer: Derenderer,
    parsing_stack: Any,
    reference: Any,
    make_parsing_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = reference.record_requests(monkeypatch)
    body = {"messages": USER, **more}
    asyncio.run(reference.Reference(parsing_stack, [EOS]).chat(body))
    play(parsing_derenderer.open(make_parsing_job(body)), [[EOS]])
    theirs, ours = seen
    assert ours == theirs


@pytest.mark.parametrize("answer", ANSWERS)
def test_streamed_deltas_join_to_the_whole_answer(
    answer: str,
    parsing_derenderer: Derenderer,
    make_parsing_job: MakeJob,
    ids_of: Callable[[str], list[int]],
) -> None:
    text, more = ANSWERS[answer]
    ids = [*ids_of(text), EOS]
    body = {"messages": USER, **more}
    whole = play(parsing_derenderer.open(make_parsing_job(body)), [ids]).body
    streamed = play(parsing_derenderer.open(make_parsing_job({**body, **STREAM})), [ids])
    joined, expected = join(streamed.chunks), flat(whole["choices"][0])
    assert joined["content"].strip() == expected["content"].strip()
    assert joined["reasoning"].strip() == expected["reasoning"].strip()
    assert without_ids(joined)["tool_calls"] == without_ids(expected)["tool_calls"]
    assert [call["id"] for call in joined["tool_calls"]] == [
        call["id"] for call in expected["tool_calls"]
    ]
    assert joined["finish_reason"] == expected["finish_reason"]
    usage = streamed.chunks[-1]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("answer", ANSWERS)
@given(borders=st.lists(st.integers(0, 500), max_size=8), stream=st.booleans())
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_same_ids_give_the_same_bytes_however_they_were_cut(
    answer: str,
    parsing_derenderer: Derenderer,
    make_parsing_job: MakeJob,
    ids_of: Callable[[str], list[int]],
    borders: list[int],
    stream: bool,
) -> None:
    text, more = ANSWERS[answer]
    ids = [*ids_of(text), EOS]
    job = make_parsing_job(
        {"messages": USER, "stop": ["never"], **more, **(STREAM if stream else {})}
    )
    once = play(parsing_derenderer.open(job), [ids])
    many = play(parsing_derenderer.open(job), cut(ids, borders))
    assert many.raw == once.raw
    assert many.closed.body == once.closed.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_ids_ends_the_choice(
    derenderer: Derenderer,
    make_job: MakeJob,
    ids_of: Callable[[str], list[int]],
    stream: bool,
    include: bool,
) -> None:
    ids = ids_of("one two three four")
    body = {"messages": USER, "stop": ["wo thr"], "include_stop_str_in_output": include}
    answer = derenderer.open(make_job({**body, **(STREAM if stream else {})}))
    fed = [answer.feed(0, [one]) for one in ids]
    assert [one.stopped for one in fed] == [False, False, True, False]
    assert answer.is_finished
    closed = answer.close()
    text = "one two thr" if include else "one t"
    if stream:
        assert fed[3].chunks == ()
        chunks = [json.loads(chunk) for one in fed for chunk in one.chunks]
        assert join(chunks)["content"] == text
        assert chunks[-1]["choices"][0]["stop_reason"] == "wo thr"
        usage = json.loads(closed.chunks[-1])["usage"]
    else:
        answered = json.loads(closed.body)
        assert answered["choices"][0]["message"]["content"] == text
        assert answered["choices"][0]["stop_reason"] == "wo thr"
        usage = answered["usage"]
    assert usage["completion_tokens"] == 3


def test_ids_after_a_stop_string_in_the_same_feed_do_not_count(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]]
) -> None:
    answer = derenderer.open(make_job({"messages": USER, "stop": ["two"]}))
    assert answer.feed(0, ids_of("one two three four")).stopped
    assert json.loads(answer.close().body)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_chat_do_not_mix(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]], stream: bool
) -> None:
    answer = derenderer.open(make_job({"messages": USER, "n": 2, **(STREAM if stream else {})}))
    feeds = [ids_of("the first one"), ids_of("and the second")]
    chunks: list[bytes] = []
    for one, two in zip(*feeds, strict=True):
        assert not answer.is_finished
        chunks += answer.feed(0, [one]).chunks + answer.feed(1, [two]).chunks
    chunks += answer.feed(1, [EOS], finish_reason="stop").chunks
    assert not answer.is_finished
    chunks += answer.feed(0, [EOS], finish_reason="stop").chunks
    assert answer.is_finished
    closed = answer.close()
    if stream:
        parts = [json.loads(chunk) for chunk in chunks]
        texts = [join(parts, 0)["content"], join(parts, 1)["content"]]
        usage = json.loads(closed.chunks[-1])["usage"]
    else:
        body = json.loads(closed.body)
        texts = [choice["message"]["content"] for choice in body["choices"]]
        usage = body["usage"]
    assert texts == ["the first one", "and the second"]
    assert usage["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_choice_i_of_prompt_p_has_the_index_p_times_n_plus_i(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]], stream: bool
) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "echo": True, **(STREAM if stream else {})}
    job = make_job(body, "completions")
    words = [" red", " green", " blue", " black"]
    got = play(derenderer.open(job), *([[*ids_of(word)]] for word in words), finish_reason="length")
    expected = ["one red", "one green", "two blue", "two black"]
    if stream:
        texts = [""] * 4
        for choice in (c for chunk in got.chunks for c in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in got.body["choices"]]
        assert [choice["index"] for choice in got.body["choices"]] == [0, 1, 2, 3]
        assert got.body["id"] == "cmpl-r1"
    assert texts == expected
    usage = (got.chunks[-1] if stream else got.body)["usage"]
    assert usage["prompt_tokens"] == 2


def test_ids_are_echoed_as_text(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]]
) -> None:
    job = make_job({"prompt": ids_of("one two"), "echo": True}, "completions")
    got = play(derenderer.open(job), [ids_of(" three")], finish_reason="length")
    assert got.body["choices"][0]["text"] == "one two three"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_stand_beside_their_tokens(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]], stream: bool
) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, **(STREAM if stream else {})}
    answer = derenderer.open(make_job({"messages": USER, **asked}))
    ids, other = ids_of(" nice 🎉"), ids_of(" bad")[0]
    rows = [[(one, -0.25, 1), (other, -1.5, 2)] for one in ids]
    fed = answer.feed(0, ids, finish_reason="length", logprobs=rows)
    closed = answer.close()
    if stream:
        chunks = [json.loads(chunk) for chunk in fed.chunks]
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        content = [entry for part in parts for entry in part["content"]]
    else:
        content = json.loads(closed.body)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == " nice 🎉"
    assert {entry["logprob"] for entry in content} == {-0.25}
    assert [top["token"] for top in content[0]["top_logprobs"]] == [" nice", " bad"]


def test_usage_has_no_prompt_details_as_vllm_has_none_by_default(
    derenderer: Derenderer, make_job: MakeJob
) -> None:
    answer = derenderer.open(make_job({"messages": USER}))
    answer.feed(0, [EOS], finish_reason="stop", num_cached_token_ids=16)
    assert json.loads(answer.close().body)["usage"]["prompt_tokens_details"] is None


def test_token_ids_are_returned_where_asked(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]]
) -> None:
    ids = [*ids_of(TEXT), EOS]
    got = play(derenderer.open(make_job({"messages": USER, "return_token_ids": True})), [ids])
    assert got.body["choices"][0]["token_ids"] == ids


def test_an_engine_error_and_missing_logprobs_are_raised(
    derenderer: Derenderer, make_job: MakeJob
) -> None:
    with pytest.raises(EngineRequestError, match="engine failed"):
        derenderer.open(make_job({"messages": USER})).feed(0, [], finish_reason="error")
    with pytest.raises(EngineRequestError, match="one entry for each of 1 token IDs, got 0"):
        derenderer.open(make_job({"messages": USER, "logprobs": True})).feed(0, [5])
    answer = derenderer.open(make_job({"messages": USER, "logprobs": True}))
    with pytest.raises(EngineRequestError, match="token ID 5 must start with its own"):
        answer.feed(0, [5], logprobs=[[(6, -0.5, 1)]])


def test_a_choice_or_job_that_cannot_be_is_refused(
    derenderer: Derenderer, make_job: MakeJob
) -> None:
    job = make_job({"messages": USER})
    with pytest.raises(BadRequestError, match="choice must be 0 to 0, got 1"):
        derenderer.open(job).feed(1, [5])
    with pytest.raises(BadRequestError, match="JSON decode error"):
        derenderer.open(msgspec.structs.replace(job, body=b"{"))
    broken = msgspec.structs.replace(job.prompts[0], sampling_params=b"\x01")
    with pytest.raises(BadRequestError, match="sampling_params of prompt 0"):
        derenderer.open(msgspec.structs.replace(job, prompts=(broken,)))


async def test_an_answer_that_is_given_up_leaves_nothing_behind(
    derenderer: Derenderer, make_job: MakeJob, ids_of: Callable[[str], list[int]]
) -> None:
    job = await asyncio.to_thread(make_job, {"messages": USER, **STREAM})
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    answer = derenderer.open(job)
    answer.feed(0, ids_of("never finished"))
    await loop.shutdown_asyncgens()  # what the end of a service does, with streams still open
    del answer
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
