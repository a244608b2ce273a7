"""Logprobs, of the prompt and of the answer, against vLLM's own server: the same numbers give the same JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from headrace.derender.handler import PROMPT_LOGPROB_S, StreamHandler
from headrace.derender.renderer import AnswerStream, Derenderer
from headrace.shared import prompt_logprobs as packing
from headrace.shared import token_ids as packed
from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import Endpoint, Job, PromptLogprobs, Tokens

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MakeJob = Callable[..., Job]

EOS = 2
USER = [{"role": "user", "content": "hi"}]
PARTS = "Köln 🎉👩‍🚀 über"  # characters of several token IDs
CASES: list[tuple[Endpoint, dict[str, Any]]] = [
    ("chat.completions", {"messages": USER, "prompt_logprobs": 0}),
    ("chat.completions", {"messages": USER, "prompt_logprobs": 2}),
    ("chat.completions", {"messages": USER, "logprobs": True, "top_logprobs": 3}),
    ("chat.completions", {"messages": USER, "logprobs": True, "top_logprobs": 2, "echo": True}),
    ("chat.completions", {"messages": [{"role": "user", "content": PARTS}], "prompt_logprobs": 1}),
    ("completions", {"prompt": "one two three", "prompt_logprobs": 2}),
    ("completions", {"prompt": "one two three", "echo": True, "logprobs": 0}),
    ("completions", {"prompt": "one two three", "echo": True, "logprobs": 2}),
    ("completions", {"prompt": PARTS, "echo": True, "logprobs": 1}),
    ("completions", {"prompt": [5], "echo": True, "logprobs": 1}),
    ("completions", {"prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("completions", {"prompt": "one two", "echo": True, "logprobs": 1, "prompt_logprobs": 3}),
    ("completions", {"prompt": "one two", "echo": True, "logprobs": 1, "return_token_ids": True}),
    ("completions", {"prompt": ["one two", "three"], "echo": True, "logprobs": 1}),
    (
        "completions",
        {"prompt": "one", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    ),
    (
        "completions",
        {"prompt": "one two three", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 1},
    ),
]


@pytest.fixture(scope="module")
def answer_ids(stack: Any) -> list[int]:
    text = stack.renderer.get_tokenizer().encode(" très nice 🎉", add_special_tokens=False)
    return [*text, EOS]


def table_of(reference: Any, prompt: list[int], asked: int) -> PromptLogprobs:
    """Return what an engine gives, in the form of the wire."""
    rows = [reference.scores(token_id, asked) for token_id in prompt[1:]]
    return packing.pack(
        [token_id for row in rows for token_id in row[0]],
        [logprob for row in rows for logprob in row[1]],
        [row[2] for row in rows],
        num_rows=len(rows),
    )


def rows_of(reference: Any, job: Job, token_ids: list[int]) -> Any:
    """Return the logprobs of an answer's IDs as an engine gives them: each ID once, the sampled one first."""
    num = msgspec.msgpack.decode(job.prompts[0].sampling_params).get("logprobs")
    if num is None:
        return None
    rows = []
    for token_id in token_ids:
        ids, logprobs, rank = reference.scores(token_id, num)
        first = {one: logprob for one, logprob in zip(ids, logprobs, strict=True)}
        rows.append([(one, logprob, rank) for one, logprob in first.items()])
    return rows


def feeds(reference: Any, job: Job, token_ids: list[int]) -> Iterator[Tokens]:
    """Yield the entries of a stream: each ID of each choice alone."""
    rows = rows_of(reference, job, token_ids)
    index = 0
    for choice in range(len(job.prompts) * job.n):
        prompt = job.prompts[choice // job.n]
        table = None
        if prompt.prompt_logprobs is not None and choice % job.n == 0:
            ids = packed.unpack(prompt.token_ids)
            table = table_of(reference, ids, prompt.prompt_logprobs)
        for place, token_id in enumerate(token_ids):
            yield Tokens(
                stream_id=1,
                index=index,
                choice=choice,
                token_ids=packed.pack([token_id]),
                finish_reason="stop" if place == len(token_ids) - 1 else None,
                logprobs=rows and [rows[place]],
                prompt_logprobs=table if place == 0 else None,
            )
            index += 1


def play(answer: AnswerStream, entries: Iterator[Tokens]) -> tuple[list[dict[str, Any]], Any]:
    chunks: list[bytes] = []
    for entry in entries:
        chunks += answer.feed(
            entry.choice,
            packed.unpack(entry.token_ids),
            finish_reason=entry.finish_reason,
            logprobs=entry.logprobs,
            prompt_logprobs=entry.prompt_logprobs,
        ).chunks
    closed = answer.close()
    body = json.loads(closed.body) if closed.body else None
    return [json.loads(chunk) for chunk in (*chunks, *closed.chunks)], body


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return text and logprobs of each choice as a client puts them together."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for chunk in chunks for choice in chunk["choices"]):
        into = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
        into["text"] += part["text"]
        for name, values in (part["logprobs"] or {}).items():
            into["logprobs"].setdefault(name, []).extend(values)
    return choices


@pytest.mark.parametrize(("endpoint", "body"), CASES, ids=lambda value: str(value)[:90])
def test_a_whole_answer_has_the_logprobs_of_vllms_server(
    endpoint: Endpoint,
    body: dict[str, Any],
    derenderer: Derenderer,
    stack: Any,
    reference: Any,
    make_job: MakeJob,
    answer_ids: list[int],
) -> None:
    server = reference.Reference(stack, answer_ids)
    ask = server.chat if endpoint == "chat.completions" else server.completion
    theirs = json.loads(asyncio.run(ask(body)).model_dump_json())
    job = make_job(body, endpoint)
    _, ours = play(derenderer.open(job), feeds(reference, job, answer_ids))
    assert ours["choices"] == theirs["choices"]
    assert ours.get("prompt_logprobs") == theirs.get("prompt_logprobs")
    assert "logprob" in json.dumps(ours)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "one two three", "echo": True, "logprobs": 2},
        {"prompt": PARTS, "echo": True, "logprobs": 1},
        {"prompt": ["one two", "three"], "echo": True, "logprobs": 1},
        {"prompt": "one two", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "one two", "prompt_logprobs": 0},
    ],
    ids=str,
)
def test_a_streamed_answer_has_the_logprobs_of_vllms_server(
    body: dict[str, Any],
    derenderer: Derenderer,
    stack: Any,
    reference: Any,
    make_job: MakeJob,
    answer_ids: list[int],
) -> None:
    asked = {**body, "stream": True}
    ids = answer_ids[:1] if body.get("max_tokens") == 0 else answer_ids
    lines = asyncio.run(reference.Reference(stack, ids).completion(asked))
    events = [line.removeprefix("data: ").strip() for line in lines]
    theirs = [json.loads(event) for event in events if event != "[DONE]"]
    job = make_job(asked, "completions")
    ours, _ = play(derenderer.open(job), feeds(reference, job, ids))
    assert joined(ours) == joined(theirs)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_a_prompt_has_the_logprobs_that_came_with_the_first(
    derenderer: Derenderer,
    reference: Any,
    make_job: MakeJob,
    answer_ids: list[int],
    stream: bool,
) -> None:
    body = {"prompt": ["one two", "three"], "n": 2, "echo": True, "logprobs": 1, "stream": stream}
    job = make_job(body, "completions")
    chunks, whole = play(derenderer.open(job), feeds(reference, job, answer_ids))
    found = joined(chunks if stream else [whole])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0]["logprobs"]["tokens"][:2] == ["one", " two"]
    assert found[2]["logprobs"]["token_logprobs"][0] is None


def test_the_ids_that_come_with_a_prompts_logprobs_may_be_one_or_many(
    derenderer: Derenderer, reference: Any, make_job: MakeJob, answer_ids: list[int]
) -> None:
    job = make_job({"prompt": "one two", "echo": True, "logprobs": 1}, "completions")
    entries = list(feeds(reference, job, answer_ids))
    _, alone = play(derenderer.open(job), iter(entries))
    at_once = msgspec.structs.replace(
        entries[0],
        token_ids=packed.pack(answer_ids),
        finish_reason="stop",
        logprobs=rows_of(reference, job, answer_ids),
    )
    _, together = play(derenderer.open(job), iter([at_once]))
    assert together == alone
    assert len(alone["choices"][0]["prompt_logprobs"]) == 2


def test_a_stream_that_is_sent_again_gives_the_same_answer(
    derenderer: Derenderer, reference: Any, make_job: MakeJob, answer_ids: list[int]
) -> None:
    body = {"prompt": "one two", "echo": True, "logprobs": 1, "stream": True}
    job = make_job(body, "completions")
    entries = list(feeds(reference, job, answer_ids))
    first, again = (
        StreamHandler(job, derenderer.open(job), instance="derender-1") for _ in range(2)
    )
    assert first.work_off(entries).steps == again.work_off(entries[:1]).steps + (
        again.work_off(entries).steps
    )
    assert first.next_index == len(entries)


def test_missing_or_foreign_logprobs_of_a_prompt_are_an_error(
    derenderer: Derenderer, reference: Any, make_job: MakeJob
) -> None:
    job = make_job({"prompt": "one two three", "prompt_logprobs": 1}, "completions")
    ids = packed.unpack(job.prompts[0].token_ids)
    with pytest.raises(EngineRequestError, match="asked for, and did not come"):
        derenderer.open(job).feed(0, [5])
    short = table_of(reference, ids[:-1], 1)
    with pytest.raises(EngineRequestError, match=r"take \[16, 16, 8\] bytes"):
        derenderer.open(job).feed(0, [5], prompt_logprobs=short)
    foreign = table_of(reference, [*ids[:-1], ids[-1] + 1], 1)
    with pytest.raises(EngineRequestError, match="of another prompt"):
        derenderer.open(job).feed(0, [5], prompt_logprobs=foreign)
    assert derenderer.open(job).feed(0, [5], prompt_logprobs=table_of(reference, ids, 1))


def test_a_prompts_logprobs_are_expected_to_take_their_time_in_the_feeds_that_work_them_off(
    derenderer: Derenderer, reference: Any, make_job: MakeJob, answer_ids: list[int]
) -> None:
    body = {"prompt": [5] * 2000, "n": 2, "prompt_logprobs": 4, "max_tokens": 9}
    job = make_job(body, "completions")
    entries = list(feeds(reference, job, answer_ids))
    handler = StreamHandler(job, derenderer.open(job), instance="derender-1")
    num = len(answer_ids)
    table_s = 1999 * 5 * PROMPT_LOGPROB_S
    assert handler.work_off_s(entries[:1]) > table_s
    handler.work_off(entries[:1])
    assert handler.work_off_s(entries[1:2]) < table_s / 2
    assert handler.work_off_s(entries[num : num + 1]) > table_s
    handler.work_off(entries)
    assert handler.work_off_s(entries[num + 1 :]) < table_s / 2
    assert handler.close_s() > 2 * table_s
