"""What an answer repeats of its request: the last message, the prompt's text, the client's own ID."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.derender.renderer import Derenderer
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.shared import token_ids
from headrace.shared.messages import Job

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MakeJob = Callable[..., Job]

EOS = 2
USER = [{"role": "user", "content": "hi"}]
OPEN = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
QUOTED = 'the "first" \\ 1'


@pytest.fixture(scope="module")
def ids(stack: Any) -> list[int]:
    return [*stack.renderer.get_tokenizer().encode("hello there"), EOS]


def whole(derenderer: Derenderer, job: Job, ids: list[int]) -> dict[str, Any]:
    answer = derenderer.open(job)
    prompt = job.prompts[0]  # a chat's echo asks for the logprobs of its prompt, as in vLLM
    table = expected_prompt_logprobs(token_ids.unpack(prompt.token_ids), prompt.prompt_logprobs)
    answer.feed(0, ids, finish_reason="stop", prompt_logprobs=table)
    body: dict[str, Any] = json.loads(answer.close().body)
    return body


@pytest.mark.parametrize(
    "body",
    [
        {"messages": OPEN, "echo": True, **CONTINUE},
        {"messages": USER, "echo": True},
        {"messages": USER, "return_prompt_text": True},
        {"messages": USER, "return_prompt_text": True, "tools": TOOLS},
        {"messages": OPEN, "echo": True, "return_prompt_text": True, **CONTINUE},
        {"messages": USER, "request_id": "mine"},
        {"messages": USER, "request_id": QUOTED},
    ],
    ids=["echo", "echo of a user", "prompt text", "with tools", "both", "ID", "ID with quotes"],
)
def test_what_a_chat_repeats_is_what_vllms_server_repeats(
    body: dict[str, Any],
    parsing_derenderer: Derenderer,
    parsing_stack: Any,
    reference: Any,
    make_parsing_job: MakeJob,
    ids: list[int],
) -> None:
    theirs = asyncio.run(reference.Reference(parsing_stack, ids).chat(body)).model_dump(mode="json")
    ours = whole(parsing_derenderer, make_parsing_job(body), ids)
    assert ours["choices"][0]["message"] == theirs["choices"][0]["message"]
    assert ours["prompt_text"] == theirs["prompt_text"]
    if "request_id" in body:
        assert ours["id"] == theirs["id"]


def test_every_chunk_has_the_time_of_the_job_whatever_the_clients_id_is(
    derenderer: Derenderer, make_job: MakeJob, ids: list[int]
) -> None:
    job = make_job({"messages": USER, "request_id": QUOTED, "stream": True})
    answer = derenderer.open(job)
    chunks = [json.loads(chunk) for chunk in answer.feed(0, ids, finish_reason="stop").chunks]
    assert {chunk["created"] for chunk in chunks} == {job.created}
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{QUOTED}"}


def test_the_id_of_the_header_goes_before_the_bodys_as_in_vllm(
    derenderer: Derenderer, make_job: MakeJob, ids: list[int]
) -> None:
    job = make_job({"messages": USER, "request_id": "of-the-body"})
    assert whole(derenderer, job, ids)["id"] == "chatcmpl-of-the-body"
    job = msgspec.structs.replace(job, request_id="of-the-header", is_own_id=True)
    assert whole(derenderer, job, ids)["id"] == "chatcmpl-of-the-header"


@pytest.mark.parametrize("prompt", ["one two three four", [504, 3575, 282, 4649, 314]], ids=type)
def test_a_truncated_prompt_is_echoed_as_it_was_given(
    prompt: Any, derenderer: Derenderer, make_job: MakeJob, stack: Any, ids: list[int]
) -> None:
    body = {"prompt": prompt, "echo": True, "truncate_prompt_tokens": 2}
    text = whole(derenderer, make_job(body, "completions"), ids)["choices"][0]["text"]
    decoded = stack.renderer.get_tokenizer().decode
    given = prompt if isinstance(prompt, str) else decoded(prompt)
    assert text == f"{given}hello there"
