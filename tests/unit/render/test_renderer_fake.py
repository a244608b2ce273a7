"""The fake renderer: bytes for IDs, and the mistakes that it refuses."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.render.renderer import Rendered, Renderer, build
from headrace.shared import token_ids
from headrace.shared.errors import BadRequestError, ModelNotFoundError
from headrace.shared.messages import Ask, Endpoint
from headrace.shared.settings import Settings, load

USER = [{"role": "user", "content": "hé"}]


@pytest.fixture
def renderer() -> Renderer:
    return build(Settings(), "fake")


async def render(
    renderer: Renderer, body: dict[str, Any], endpoint: Endpoint = "chat.completions"
) -> Rendered:
    return await renderer.render(endpoint, json.dumps(body).encode())


def params_of(rendered: Rendered) -> dict[str, Any]:
    params: dict[str, Any] = msgspec.msgpack.decode(rendered.prompts[0].sampling_params)
    return params


@pytest.mark.asyncio
async def test_a_chat_becomes_the_bytes_of_its_messages(renderer: Renderer) -> None:
    rendered = await render(renderer, {"messages": USER})
    assert (
        bytes(token_ids.unpack(rendered.prompts[0].token_ids)) == "user: hé\nassistant: ".encode()
    )
    assert (rendered.n, rendered.stream, rendered.priority) == (1, False, 0)


@pytest.mark.asyncio
async def test_sampling_parameters_have_vllms_names(renderer: Renderer) -> None:
    body = {"messages": USER, "stop": "x", "seed": 3, "ignore_eos": True, "n": 2, "priority": 4}
    rendered = await render(renderer, {**body, "cache_salt": "s", "logprobs": True})
    params = params_of(rendered)
    assert params["max_tokens"] == 64
    assert params["stop"] == ["x"]
    assert (params["seed"], params["ignore_eos"], params["logprobs"]) == (3, True, 0)
    assert (rendered.n, rendered.priority, rendered.prompts[0].cache_salt) == (2, 4, "s")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["a", "b"], [b"a", b"b"]),
        ([97, 98], [b"ab"]),
        ([[97], [98]], [b"a", b"b"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.asyncio
async def test_a_completion_has_a_prompt_for_each_of_its_prompts(
    renderer: Renderer, prompt: object, expected: list[bytes]
) -> None:
    rendered = await render(renderer, {"prompt": prompt}, "completions")
    assert [bytes(token_ids.unpack(p.token_ids)) for p in rendered.prompts] == expected


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, "missing required field `messages`"),
        ({"messages": []}, "messages", "length"),
        ({"messages": [{"role": "alien"}]}, "messages[0].role", "Supported values are: 'system'"),
        ({"messages": USER, "max_tokens": -1}, "max_tokens", "at least 1, got -1"),
        ({"messages": USER, "max_tokens": "x"}, "max_tokens", "Expected `int"),
        ({"messages": USER, "n": 0}, "n", ">= 1"),
        ({"messages": USER, "temperature": -1}, "temperature", ">= 0"),
        ({"messages": USER, "stop": [""]}, "stop", "empty string"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, "input_tokens", "max_model_len"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages",
            "only text",
        ),
    ],
)
@pytest.mark.asyncio
async def test_a_mistake_is_named_with_its_field(
    body: dict[str, Any], param: str | None, words: str
) -> None:
    renderer = build(load(env={}, overrides={"fake": {"max_model_len": 80}}), "fake")
    with pytest.raises(BadRequestError) as caught:
        await render(renderer, body)
    assert words in caught.value.message
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"{", b"[1]", b"", b"\xff", b"null"])
@pytest.mark.asyncio
async def test_what_is_no_json_object_is_a_bad_request(renderer: Renderer, body: bytes) -> None:
    with pytest.raises(BadRequestError):
        await renderer.render("completions", body)


@pytest.mark.parametrize("prompt", ["", [], [[]], [256], [-1]])
@pytest.mark.asyncio
async def test_an_empty_prompt_or_a_foreign_id_is_a_bad_request(
    renderer: Renderer, prompt: object
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await render(renderer, {"prompt": prompt}, "completions")
    assert caught.value.param == "prompt"


@pytest.mark.asyncio
async def test_another_model_is_not_found(renderer: Renderer) -> None:
    with pytest.raises(ModelNotFoundError, match="`gpt` does not exist"):
        await render(renderer, {"messages": USER, "model": "gpt"})


def ask(endpoint: Any, body: dict[str, Any]) -> Ask:
    data = json.dumps(body).encode()
    return Ask(request_id="q", tenant="t", endpoint=endpoint, deadline=0.0, body=data)


@pytest.mark.asyncio
async def test_text_is_its_bytes_and_back(renderer: Renderer) -> None:
    body = {"prompt": "hé", "return_token_strs": True}
    answer = json.loads(await renderer.ask(ask("tokenize", body)))
    assert answer == {
        "count": 3,
        "max_model_len": renderer.max_model_len,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "Ã", "©"],
    }
    answer = json.loads(await renderer.ask(ask("detokenize", {"tokens": [104, 195, 169]})))
    assert answer == {"prompt": "hé"}


@pytest.mark.parametrize(
    ("endpoint", "body", "told"),
    [
        ("tokenize", {}, "prompt"),
        ("detokenize", {"tokens": [256]}, "<= 255"),
        ("completions.render", {}, "completions.render is not supported by the fake engine"),
    ],
)
@pytest.mark.asyncio
async def test_a_wrong_question_is_refused(
    renderer: Renderer, endpoint: str, body: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadRequestError, match=told):
        await renderer.ask(ask(endpoint, body))


@pytest.mark.asyncio
async def test_token_ids_and_parameters_of_a_generate_request_are_taken_as_they_are(
    renderer: Renderer,
) -> None:
    params = {"max_tokens": 7, "n": 2, "seed": 3}
    body = {
        "token_ids": [1, 255],
        "sampling_params": params,
        "stream": True,
        "priority": 4,
        "cache_salt": "s",
    }
    rendered = await render(renderer, body, "generate")
    assert token_ids.unpack(rendered.prompts[0].token_ids) == [1, 255]
    given = params_of(rendered)
    assert {name: given[name] for name in params} == params
    assert (rendered.n, rendered.stream, rendered.priority) == (2, True, 4)
    assert rendered.prompts[0].cache_salt == "s"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"token_ids": [256]}, "prompt"),
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
@pytest.mark.asyncio
async def test_a_wrong_generate_request_is_refused(
    renderer: Renderer, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await render(renderer, {"token_ids": [1], "sampling_params": {}, **more}, "generate")
    assert caught.value.param == param
