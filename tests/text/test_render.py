"""Render against vLLM's own server: the same tokens, and the same words for every mistake."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.render.renderer import Rendered, Renderer
from headrace.shared import token_ids
from headrace.shared.errors import BadRequestError, RequestError
from headrace.shared.messages import Endpoint

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

USER = [{"role": "user", "content": "hi"}]
DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT_FUNCTION = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"the_only_city": {"type": "string"}}},
}


def render(renderer: Renderer, body: Any, endpoint: Endpoint = "chat.completions") -> Rendered:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(renderer.render(endpoint, data))


def params_of(rendered: Rendered) -> dict[str, Any]:
    params: dict[str, Any] = msgspec.msgpack.decode(rendered.prompts[0].sampling_params)
    return params


def test_a_chat_is_rendered_with_the_models_template(renderer: Renderer, stack: Any) -> None:
    rendered = render(renderer, {"messages": USER})
    text = stack.renderer.get_tokenizer().decode(token_ids.unpack(rendered.prompts[0].token_ids))
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_max_tokens_default_to_what_the_context_leaves(renderer: Renderer) -> None:
    rendered = render(renderer, {"messages": USER})
    used = token_ids.count(rendered.prompts[0].token_ids)
    assert params_of(rendered)["max_tokens"] == renderer.max_model_len - used
    short = params_of(render(renderer, {"prompt": "x"}, "completions"))
    assert short.get("max_tokens", 16) == 16


def test_what_the_job_carries_is_what_was_asked(renderer: Renderer) -> None:
    body = {
        "messages": USER,
        "n": 2,
        "stream": True,
        "priority": 3,
        "cache_salt": "salt",
        "seed": 5,
    }
    rendered = render(renderer, body)
    assert (rendered.n, rendered.stream, rendered.priority) == (2, True, 3)
    assert rendered.prompts[0].cache_salt == "salt"
    assert params_of(rendered)["seed"] == 5


def test_a_completion_has_a_prompt_for_each_of_its_prompts(renderer: Renderer) -> None:
    rendered = render(renderer, {"prompt": ["a", "b"], "n": 2}, "completions")
    assert len(rendered.prompts) == 2
    ids = render(renderer, {"prompt": [5, 6, 7]}, "completions").prompts[0].token_ids
    assert token_ids.unpack(ids) == [5, 6, 7]


def test_the_strict_level_of_the_settings_holds_tool_calls_to_their_schema(
    parsing_renderer: Renderer, strict_renderer: Renderer
) -> None:
    body = {"messages": USER, "tools": [{"type": "function", "function": STRICT_FUNCTION}]}
    assert params_of(render(parsing_renderer, body)).get("structured_outputs") is None
    grammar = params_of(render(strict_renderer, body))["structured_outputs"]
    assert "the_only_city" in json.dumps(grammar)


def test_reasoning_and_grammar_of_the_request_go_along(parsing_renderer: Renderer) -> None:
    body = {"messages": USER, "response_format": {"type": "json_object"}}
    rendered = render(parsing_renderer, body)
    assert rendered.prompts[0].reasoning_ended is not None
    assert rendered.prompts[0].reasoning_parser_kwargs is not None
    assert params_of(rendered)["structured_outputs"] is not None
    off = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    assert render(parsing_renderer, off).prompts[0].reasoning_parser_kwargs == {
        "chat_template_kwargs": {
            **rendered.prompts[0].reasoning_parser_kwargs["chat_template_kwargs"],
            "enable_thinking": False,
        }
    }


@pytest.mark.parametrize(
    ("endpoint", "more", "asked"),
    [
        ("chat.completions", {}, None),
        ("chat.completions", {"prompt_logprobs": 0}, 0),
        ("chat.completions", {"prompt_logprobs": 20}, 20),
        ("chat.completions", {"logprobs": True, "top_logprobs": 3}, None),
        ("chat.completions", {"logprobs": True, "top_logprobs": 3, "echo": True}, 3),
        ("completions", {"logprobs": 2}, None),
        ("completions", {"logprobs": 2, "echo": True}, 2),
        ("completions", {"logprobs": 2, "echo": True, "prompt_logprobs": 1}, 1),
        ("completions", {"logprobs": 2, "echo": True, "stream": True}, 2),
        ("completions", {"prompt_logprobs": 0, "stream": True}, 0),
    ],
)
def test_the_job_says_which_logprobs_of_the_prompt_the_answer_needs(
    renderer: Renderer, endpoint: Endpoint, more: dict[str, Any], asked: int | None
) -> None:
    base = {"messages": USER} if endpoint == "chat.completions" else {"prompt": "hi there"}
    assert render(renderer, {**base, **more}, endpoint).prompts[0].prompt_logprobs == asked


def test_more_logprobs_than_an_answer_can_carry_are_refused(renderer: Renderer) -> None:
    body = {"prompt": [5] * 5000, "prompt_logprobs": 19, "n": 4, "max_tokens": 5}
    assert render(renderer, body, "completions").prompts[0].prompt_logprobs == 19
    with pytest.raises(BadRequestError, match="would give 499,900 entries") as caught:
        render(renderer, {**body, "n": 5}, "completions")
    assert caught.value.param == "prompt_logprobs"


MISTAKES: list[tuple[Endpoint, Any]] = [
    *(
        ("chat.completions", body)
        for body in [
            b"{",
            b"",
            b"[1]",
            b"null",
            b'"x"',
            {},
            {"messages": []},
            {"messages": "x"},
            {"messages": [{"content": "x"}]},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": USER, "model": "other"},
            {"messages": USER, "max_tokens": -1},
            {"messages": USER, "max_tokens": 0},
            {"messages": USER, "max_tokens": 10**6},
            {"messages": USER, "max_tokens": "many"},
            {"messages": USER, "temperature": -1},
            {"messages": USER, "temperature": "hot"},
            {"messages": USER, "top_p": 2},
            {"messages": USER, "n": 0},
            {"messages": USER, "n": 2, "temperature": 0},
            {"messages": USER, "min_tokens": 5, "max_tokens": 2},
            {"messages": USER, "stop": [""]},
            {"messages": USER, "seed": 2**70},
            {"messages": USER, "tools": [TOOL]},
            {"messages": USER, "tools": [TOOL], "tool_choice": "required"},
            {"messages": USER, "top_logprobs": 2},
            {"messages": USER, "logprobs": True, "top_logprobs": 30},
            {"messages": USER, "prompt_logprobs": 1, "stream": True},
            {"messages": USER, "prompt_logprobs": 21},
            {"messages": USER, "prompt_logprobs": -1},
            {"messages": USER, "prompt_logprobs": -2},
            {"messages": USER, "prompt_logprobs": "many"},
            {"messages": USER, "logit_bias": {"99999": 1}},
            {"messages": USER, "allowed_token_ids": [99999]},
            {"messages": USER, "chat_template": "x"},
            {"messages": USER, "stream_options": {"include_usage": True}},
            {"messages": USER, "response_format": {"type": "json_schema"}},
            {"messages": USER, "structured_outputs": {"regex": "("}},
            {"messages": USER, "thinking_token_budget": 5},
            {"messages": [{"role": "user", "content": "hi " * 9000}]},
        ]
    ),
    *(
        ("completions", body)
        for body in [
            {},
            {"prompt": ""},
            {"prompt": []},
            {"prompt": ["x", ""]},
            {"prompt": 5},
            {"prompt": [-1]},
            {"prompt": "x", "suffix": "y"},
            {"prompt": "x", "max_tokens": 0},
            {"prompt": "x", "logprobs": 50},
            {"prompt": "x", "echo": True, "logprobs": 50},
            {"prompt": "x", "prompt_logprobs": 2, "stream": True},
            {"prompt": "x", "prompt_logprobs": 21},
            {"prompt": "x", "prompt_logprobs": -1},
            {"prompt": "hi " * 9000},
            {"prompt": "x", "model": "other"},
        ]
    ),
]


@pytest.mark.parametrize(("endpoint", "body"), MISTAKES, ids=lambda value: str(value)[:70])
def test_a_mistake_gets_the_very_answer_of_vllms_server(
    renderer: Renderer, stack: Any, reference: Any, endpoint: Endpoint, body: Any
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(
            reference.Reference(stack).app(), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            headers = {"content-type": "application/json"}
            return await client.post(f"/{endpoint}", content=data, headers=headers)

    theirs = asyncio.run(ask())
    with pytest.raises(RequestError) as caught:
        render(renderer, data, endpoint)
    ours = caught.value
    assert theirs.json()["error"] == {
        "message": ours.message,
        "type": ours.error_type,
        "param": ours.param,
        "code": ours.http_status,
    }
    assert theirs.status_code == ours.http_status


REFUSED: list[tuple[Endpoint, dict[str, Any], str]] = [
    ("chat.completions", {"messages": [*USER, {"role": "alien"}]}, "messages[1].role"),
    ("chat.completions", {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ("chat.completions", {"vllm_xargs": {"kv_transfer_params": "a"}}, "kv_transfer_params"),
    ("chat.completions", {"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
    ("chat.completions", {"use_beam_search": True}, "use_beam_search"),
    (
        "chat.completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
            ]
        },
        "messages",
    ),
    ("completions", {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ("completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ("completions", {"prompt": [5, 99999]}, "prompt"),
    ("completions", {"prompt": [5] * 8000, "prompt_logprobs": 20, "n": 3}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("endpoint", "more", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_answered_rightly_is_refused_by_name(
    renderer: Renderer, endpoint: Endpoint, more: dict[str, Any], param: str
) -> None:
    base = {"messages": USER} if endpoint == "chat.completions" else {}
    with pytest.raises(BadRequestError) as caught:
        render(renderer, {**base, **more}, endpoint)
    assert caught.value.param == param


def test_the_document_names_what_is_refused_and_nothing_else() -> None:
    rows = [
        line.split(" | ") for line in DOCUMENT.read_text().splitlines() if " | refused | " in line
    ]
    told = {row[0].split("`")[1] for row in rows}
    assert told == {param.replace("[1]", "[i]") for _, _, param in REFUSED}


@pytest.mark.parametrize("body", [b'{"temperature": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_a_bad_request(renderer: Renderer, body: bytes) -> None:
    with pytest.raises(BadRequestError, match="JSON decode error"):
        render(renderer, body)


def test_the_loop_is_free_while_a_large_prompt_is_rendered(renderer: Renderer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi " * 400_000}]}).encode()

    async def count() -> int:
        turns = 0
        rendering = asyncio.ensure_future(renderer.render("chat.completions", body))
        while not rendering.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(BadRequestError, match="maximum context length"):
            await rendering
        return turns

    assert asyncio.run(count()) > 3  # on the loop it would be 1 or 2
