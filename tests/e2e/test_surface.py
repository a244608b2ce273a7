"""The other endpoints on the real stack: the Responses API by the SDK, and the three calls of scale-out clients."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from ..real_stack import MODEL, Stack, Stacks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

QUESTION = "What is the capital of France?"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 20,
}


@pytest.fixture(scope="module")
def stack(stacks: Stacks) -> Stack:
    """A stack without parsers: with one, derendered token IDs keep the marker of the end, as in vLLM itself."""
    return stacks.get()


@pytest.fixture(scope="module")
def whole(stack: Stack) -> dict[str, Any]:
    """What one chat call answers."""
    return post(stack, "/v1/chat/completions", CHAT)


def post(stack: Stack, path: str, body: Any) -> Any:
    answer = httpx.post(f"{stack.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_text_is_tokenized_as_by_the_models_tokenizer(stack: Stack, model_folder: Path) -> None:
    ids = AutoTokenizer.from_pretrained(model_folder)(QUESTION)["input_ids"]
    answer = post(stack, "/tokenize", {"model": MODEL, "prompt": QUESTION})
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert post(stack, "/detokenize", {"model": MODEL, "tokens": ids}) == {"prompt": QUESTION}


def test_render_generate_and_derender_make_the_answer_of_one_call(
    stack: Stack, whole: dict[str, Any]
) -> None:
    rendered = post(stack, "/v1/chat/completions/render", CHAT)
    generated = post(stack, "/inference/v1/generate", rendered)
    derendered = post(
        stack,
        "/v1/chat/completions/derender",
        {
            "model": MODEL,
            "generate_response": generated,
            "chat_request": CHAT,
            "prompt_tokens": len(rendered["token_ids"]),
            "prompt_token_ids": rendered["token_ids"],
        },
    )
    assert "Paris" in derendered["choices"][0]["message"]["content"]
    ours, theirs = derendered["choices"][0], whole["choices"][0]
    assert ours["message"]["content"] == theirs["message"]["content"]
    assert ours["finish_reason"] == theirs["finish_reason"]
    assert derendered["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_the_three_calls_stream_the_answer_of_one_call(stack: Stack, whole: dict[str, Any]) -> None:
    rendered = post(stack, "/v1/chat/completions/render", {**CHAT, "stream": True})
    state, content, ends = None, "", []
    url = f"{stack.url}/inference/v1/generate"
    with httpx.stream("POST", url, json=rendered, timeout=120) as answer:
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert data.pop() == "[DONE]"
    for chunk in data:
        body = {"stream": True, "generate_chunk": json.loads(chunk), "stream_state": state}
        part = post(stack, "/v1/chat/completions/derender", {**body, "chat_request": CHAT})
        state = part["stream_state"]
        for choice in part["chunk"]["choices"]:
            content += choice["delta"].get("content") or ""
            ends.append(choice["finish_reason"])
    assert content == whole["choices"][0]["message"]["content"]
    assert ends[-1] == whole["choices"][0]["finish_reason"]


def test_completions_go_the_three_ways_too(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": ["One, two,", "A, b,"], "temperature": 0, "max_tokens": 8}
    rendered = post(stack, "/v1/completions/render", body)
    generated = [post(stack, "/inference/v1/generate", request) for request in rendered]
    derendered = post(stack, "/v1/completions/derender", {"generate_responses": generated})
    whole = post(stack, "/v1/completions", body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["text"] for choice in derendered["choices"]] == texts


def test_a_response_is_what_a_chat_answers(stack: Stack, whole: dict[str, Any]) -> None:
    response = client_of(stack).responses.create(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20
    )
    assert response.output_text == whole["choices"][0]["message"]["content"]
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == whole["usage"]["total_tokens"]


def test_a_response_streams_what_it_answers_whole(stack: Stack, whole: dict[str, Any]) -> None:
    text = ""
    with client_of(stack).responses.stream(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20
    ) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    assert text == final.output_text == whole["choices"][0]["message"]["content"]


def test_a_background_response_is_what_a_chat_answers(stack: Stack, whole: dict[str, Any]) -> None:
    client, text = client_of(stack), whole["choices"][0]["message"]["content"]
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 20}
    first = client.responses.create(input=QUESTION, background=True, **asked)
    assert first.status == "queued"
    done = until_ended(client, first.id)
    assert (done.id, done.status, done.output_text) == (first.id, "completed", text)

    events = []
    with client.responses.create(input=QUESTION, background=True, stream=True, **asked) as cut:
        for event in cut:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
    response_id = events[0].response.id
    behind = events[-1].sequence_number
    events += client.responses.retrieve(response_id, stream=True, starting_after=behind)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert client.responses.retrieve(response_id).output_text == text

    second = client.responses.create(input="Why?", previous_response_id=first.id, **asked)
    conversation = [
        *CHAT["messages"],
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Why?"},
    ]
    chat = post(stack, "/v1/chat/completions", CHAT | {"messages": conversation})
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage is not None
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]


def until_ended(client: openai.OpenAI, response_id: str) -> Any:
    """Poll as a client does."""
    give_up = time.monotonic() + 120
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < give_up
    return response


def test_the_sdk_gets_the_reason_why_a_response_is_refused(stack: Stack) -> None:
    client = client_of(stack)
    with pytest.raises(openai.BadRequestError, match="a background response is stored") as caught:
        client.responses.create(model=MODEL, input="hi", background=True, store=False)
    assert caught.value.param == "store"
    with pytest.raises(openai.NotFoundError, match="'resp_1' not found"):
        client.responses.retrieve("resp_1")
