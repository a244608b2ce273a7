"""What render remembers of earlier texts: the same token IDs as without, and no other tenant's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace.render.renderer import Renderer
from headrace.shared import token_ids
from headrace.shared.errors import RequestError
from headrace.shared.messages import Endpoint

from . import tokenizer_families
from .cached_renders import build, compare
from .random_chats import body, chats

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LONG = [
    {"role": "system", "content": "You answer in one word. " * 20},
    {"role": "user", "content": "What is the capital of France?"},
]
FAMILIES = ("sentencepiece, spaced once", "unigram", "wordpiece", "odd")


def found(render: Callable[[], Any]) -> tuple[int, int]:
    """Return how many token IDs were looked for, and how many found, while `render` ran."""
    names = ("headrace_render_cache_queries_total", "headrace_render_cache_hits_total")
    before = [REGISTRY.get_sample_value(name) or 0 for name in names]
    render()
    after = [REGISTRY.get_sample_value(name) or 0 for name in names]
    return int(after[0] - before[0]), int(after[1] - before[1])


def outcome(renderer: Renderer, data: bytes, endpoint: Endpoint, tenant: str = "t") -> Any:
    """Return the token IDs of a request, or its error."""
    try:
        rendered = asyncio.run(renderer.render(endpoint, data, tenant))
    except RequestError as error:
        return error.http_status, error.message, error.param
    return [token_ids.unpack(prompt.token_ids) for prompt in rendered.prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts token IDs of its own around a text that is no chat."""
    return tokenizer_families.make("wordpiece", tmp_path_factory.mktemp("wordpiece"))


@pytest.fixture(scope="module")
def cached(folder: Path) -> Iterator[Renderer]:
    yield from started(build(folder, 2**20))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Renderer]:
    yield from started(build(folder, 0))


def started(renderer: Renderer) -> Iterator[Renderer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(renderer.start())
    yield renderer
    asyncio.run(renderer.close())


@pytest.mark.parametrize("family", FAMILIES)
def test_random_chats_have_the_token_ids_that_they_have_without_it(
    family: str, tmp_path: Path
) -> None:
    """`python -m tests.text.cached_renders` does so with thousands."""
    compared = asyncio.run(compare(tokenizer_families.make(family, tmp_path), 60))
    assert compared.different is None
    assert compared.num_from_cache > compared.num_token_ids / 20


def test_the_next_turn_looks_only_for_what_is_new(renderer: Renderer) -> None:
    first = found(lambda: outcome(renderer, body(LONG), "chat.completions", "turns"))
    assert first == (first[0], 0)
    answer = [{"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Why?"}]
    then = found(lambda: outcome(renderer, body(LONG + answer), "chat.completions", "turns"))
    assert then[1] > first[0] * 0.9
    again = found(lambda: outcome(renderer, body(LONG + answer), "chat.completions", "turns"))
    assert again == (then[0], then[0])


@pytest.mark.parametrize(
    ("endpoint", "request_of"),
    [
        ("chat.completions", lambda salt: body(LONG, **salt)),
        ("completions", lambda salt: json.dumps({"prompt": "hi there " * 99, **salt}).encode()),
        ("responses", lambda salt: json.dumps({"input": LONG, **salt}).encode()),
    ],
)
def test_nobody_finds_what_another_tenant_or_another_salt_has_left(
    renderer: Renderer, endpoint: Endpoint, request_of: Callable[[dict[str, str]], bytes]
) -> None:
    tenants = f"acme-{endpoint}", f"globex-{endpoint}"
    whose = [(t, s) for t in tenants for s in ({}, {"cache_salt": tenants[1]})]
    for tenant, salt in whose:
        asked = found(lambda t=tenant, s=salt: outcome(renderer, request_of(s), endpoint, t))  # type: ignore[misc]
        assert asked[0] > 50
        assert asked[1] == 0, (tenant, salt)
    for tenant, salt in whose:
        asked = found(lambda t=tenant, s=salt: outcome(renderer, request_of(s), endpoint, t))  # type: ignore[misc]
        assert asked == (asked[0], asked[0])


def test_a_question_uses_nobodys_entries(renderer: Renderer) -> None:
    from headrace.shared.messages import Ask

    ask = Ask(
        request_id="r", tenant="t", endpoint="tokenize", deadline=2e9, body=b'{"prompt": "hi"}'
    )
    assert found(lambda: asyncio.run(renderer.ask(ask))) == (0, 0)


@pytest.mark.parametrize(
    ("endpoint", "request_body"),
    [
        ("completions", {"prompt": "the dog<|im_start|>user<|im_end|> fox"}),
        ("completions", {"prompt": "the dog<|im_start|>", "add_special_tokens": False}),
        ("completions", {"prompt": ["the", "the<|im_end|>dog"], "truncate_prompt_tokens": 3}),
        ("chat.completions", {"messages": LONG, "add_special_tokens": True}),
        ("chat.completions", {"messages": LONG, "truncate_prompt_tokens": 7}),
        ("chat.completions", {"messages": LONG, "truncate_prompt_tokens": -1}),
        ("chat.completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("chat.completions", {"messages": [{"role": "user", "content": "dog " * 70_000}]}),
        ("chat.completions", {"messages": [{"role": "user", "content": "dog " * 65_535}]}),
        ("chat.completions", {"messages": [{"role": "user", "content": ""}]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_else_may_be_asked_for_is_answered_as_without_it(
    cached: Renderer, plain: Renderer, endpoint: Endpoint, request_body: dict[str, Any]
) -> None:
    data = json.dumps(request_body).encode()
    expected = outcome(plain, data, endpoint)
    for _ in range(2):  # the second time from the cache
        assert outcome(cached, data, endpoint) == expected


def test_where_each_token_id_stands_in_the_text_is_told_as_without_it(
    cached: Any, plain: Any
) -> None:
    from headrace.render.tokenize_vllm import entries_of

    async def tokenized(renderer: Any) -> Any:
        vllms = renderer._pipeline._stack.renderer
        params = dataclasses.replace(vllms.default_chat_tok_params, return_token_offsets=True)
        with entries_of("t", None):
            return await vllms._tokenize_prompt_async({"prompt": "the dog<|im_end|> fox"}, params)

    told = asyncio.run(tokenized(cached))
    assert len(told["prompt_token_offsets"]) == len(told["prompt_token_ids"])
    assert told == asyncio.run(tokenized(plain))


def test_requests_at_once_get_their_own_token_ids(cached: Renderer, plain: Renderer) -> None:
    requests = [body(messages) for messages in chats(30, seed=3)]

    async def all_of(renderer: Renderer) -> list[bytes]:
        rendering = [
            renderer.render("chat.completions", data, f"tenant-{number % 3}")
            for number, data in enumerate(requests * 2)
        ]
        return [r.prompts[0].token_ids for r in await asyncio.gather(*rendering)]

    assert asyncio.run(all_of(cached)) == asyncio.run(all_of(plain))


def test_a_tokenizer_that_does_more_than_its_library_is_left_alone(stack: Any) -> None:
    from headrace.render import tokenize_vllm

    tokenizer = stack.renderer.get_tokenizer()
    known = type(tokenizer)
    assert tokenize_vllm._refusal(tokenizer) == ""
    tokenizer.__class__ = type("Own", (known,), {"__call__": known.__call__, "__module__": "own"})
    try:
        assert tokenize_vllm._refusal(tokenizer) == "Own has a __call__ of its own"
        step = stack.renderer._tokenize_prompt_async
        assert not tokenize_vllm.install(stack.renderer, 2**20)
        assert stack.renderer._tokenize_prompt_async is step
        other = {"backend_tokenizer": property(lambda self: object())}
        tokenizer.__class__ = type("Own", (known,), other)
        assert tokenize_vllm._refusal(tokenizer) == "its backend is object"
    finally:
        tokenizer.__class__ = known
    tokenizer.split_special_tokens = True
    try:
        assert "takes special tokens apart" in tokenize_vllm._refusal(tokenizer)
    finally:
        tokenizer.split_special_tokens = False
    assert "no tokenizer of the tokenizers library" in tokenize_vllm._refusal(object())


def test_a_tokenizer_whose_pieces_differ_is_left_alone(
    stack: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.render import tokenize_vllm

    monkeypatch.setattr(tokenize_vllm.cuts, "cut_tokens", lambda backend: ["the"])
    step = stack.renderer._tokenize_prompt_async
    assert not tokenize_vllm.install(stack.renderer, 2**20)
    assert stack.renderer._tokenize_prompt_async is step
    assert "pieces of texts gave other token IDs" in caplog.text
