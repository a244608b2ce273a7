"""Where vLLM 0.26 to 0.33 differ in render and derender: prompts, parsers, reasoning.

`vllm_versions` says what differs; this makes up for it. The newest release's own way is taken where there is one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from vllm import exceptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.inputs import tokens_input
from vllm.renderers import BaseRenderer, online_renderer
from vllm.renderers.online_renderer import OnlineRenderer

TAKES_PROMPTS = "_reused_prompt_token_ids" in vars(online_renderer)
"""Whether `OnlineRenderer` takes a prompt's token IDs from the request instead of rendering anew (0.27)."""

TELLS_REASONING = "reasoning_ended" in GenerateRequest.model_fields
"""Whether rendering says what the engine needs to know of a chat's reasoning (0.32)."""

_GRAMMARS = ("_grammar_from_parser", "_grammar_from_tool_parser")  # the second until 0.26


class _Prompted:
    """A renderer that renders nothing: each chat has the prompt that it was given, at once."""

    def __init__(self, renderer: BaseRenderer[Any], token_ids: Sequence[int]) -> None:
        self._renderer = renderer
        self._token_ids = token_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(self, *_: Any, **more: Any) -> tuple[list[Any], list[Any]]:
        salt = (more.get("prompt_extras") or {}).get("cache_salt")
        return [[]], [tokens_input(list(self._token_ids), cache_salt=salt)]


def with_prompt(
    renderer: OnlineRenderer,
    request: ChatCompletionRequest | ResponsesRequest,
    token_ids: Sequence[int],
) -> OnlineRenderer:
    """Return what renders this request as `token_ids`, without template and tokenizer, and never waits.

    It may write into the request's `kv_transfer_params`, which must be empty.
    """
    if TAKES_PROMPTS:
        request.kv_transfer_params = {"prompt_token_ids": list(token_ids)}
        return renderer
    mine: Any = copy.copy(renderer)
    mine.renderer = _Prompted(renderer.renderer, token_ids)
    prompted: OnlineRenderer = mine
    return prompted


def add_reasoning(
    renderer: OnlineRenderer, request: ChatCompletionRequest, generate: GenerateRequest
) -> None:
    """Add to a rendered chat what vLLM's server tells its engine of reasoning, where rendering does not."""
    if TELLS_REASONING:
        return
    parser = kwargs = None
    if renderer.parser is not None and renderer.parser.reasoning_parser_cls is not None:
        params = request.build_chat_params(
            renderer.chat_template, renderer.chat_template_content_format
        ).with_defaults(renderer.default_chat_template_kwargs)
        kwargs = {"chat_template_kwargs": params.chat_template_kwargs}
        parser = renderer.parser(
            renderer.renderer.get_tokenizer(),
            request.tools,
            model_config=renderer.model_config,
            **kwargs,
        )
    private = request.__pydantic_private__ or {}
    ended: bool | None
    if not request.include_reasoning or any(private.get(name) for name in _GRAMMARS):
        ended = True
    else:
        ended = None if parser is None else parser.is_reasoning_end(generate.token_ids)
    tell_reasoning(generate, ended, kwargs)


def tell_reasoning(
    generate: GenerateRequest, ended: bool | None, kwargs: dict[str, Any] | None
) -> None:
    """Keep with a rendered request what `reasoning` returns of it; older releases have no fields for it."""
    vars(generate).update(reasoning_ended=ended, reasoning_parser_kwargs=kwargs)


def reasoning(generate: GenerateRequest) -> tuple[bool | None, dict[str, Any] | None]:
    """Return whether the prompt ended the reasoning, and the arguments of the engine's reasoning parser."""
    kwargs = vars(generate).get("reasoning_parser_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        kwargs = kwargs.model_dump()
    return vars(generate).get("reasoning_ended"), kwargs


def warm_up(renderer: Any) -> None:
    """Let the first request find templates and tokenizer ready, where this release can prepare them."""
    if hasattr(renderer, "warmup"):
        renderer.warmup()


def validate_token_ids(renderer: Any, token_ids: list[int], *, parameter: str) -> None:
    """Raise vLLM's validation error for a token ID outside the vocabulary."""
    if hasattr(renderer, "validate_token_ids"):
        renderer.validate_token_ids(token_ids, parameter=parameter)
        return
    largest = _largest_token_id(renderer)
    for token_id in token_ids:
        if not 0 <= token_id <= largest:
            message = f"Token id {token_id} is out of vocabulary"
            raise exceptions.VLLMValidationError(message, parameter=parameter, value=token_id)


@functools.lru_cache(maxsize=1)
def _largest_token_id(renderer: Any) -> int:
    """Return the last ID of tokenizer or model; `max_token_id` of an older release is one too many."""
    vocabulary: dict[str, int] = renderer.get_tokenizer().get_vocab()
    vocab_size: int = renderer.model_config.get_vocab_size()
    return max(*vocabulary.values(), vocab_size - 1)


def make_parser(chat: Any, request: Any, tokenizer: Any, template_kwargs: Any) -> Any:
    """Return the parser of one choice, as the chat serving object makes it."""
    if hasattr(chat, "_make_parser"):
        return chat._make_parser(request, tokenizer, template_kwargs)
    return chat.parser_cls(
        tokenizer,
        request.tools,
        chat_template_kwargs=template_kwargs,
        model_config=chat.model_config,
    )
