"""Where vLLM 0.26 to 0.33 differ for us: every name that moved, every field and rule that came later.

The other files read as for the newest release. What an older one lacks is made up for here, by looking for the thing
itself and not at a version number. `headrace.engine` and the `*_vllm.py` of render and derender import from here.

Names that moved (`_PLACES`): the error response, its maker and the validation handler, the metadata of a response, chat
messages and their templates. Names that an older release lacks (`_PLACES`, with a stand-in): streamed derender requests
and responses, a parser's keyword arguments, the test for content that is no text.

Errors: 0.26 has no common `VLLMError`. Its errors of the client are three classes, two of them `ValueError`s; an
engine's failure of one request is an `EngineGenerateError`; there is no refusal by a full queue.

Configuration: 0.26 has no `tool_strict_level`, and puts a reasoning parser into that of structured outputs only where
it makes the whole of it.

Serving objects: 0.26 has no warm-up, no check of a prompt's token IDs and no method that makes a choice's parser.

Sampling parameters: 0.26 has no `watermarking` and no `trace_decode_token_ids`.

What 0.26 can't do here: derender fails chats and the Responses API, because `render_chat` always renders anew, and
waits meanwhile; a request does not say whether its reasoning has ended; `tool_strict_level` has no effect.

NIXL, in the engine's worker:
- 0.26 asks for finished transfers by `get_finished`, two sets; later ones by `get_transfer_results`, an object.
- 0.26's `_pop_done_transfers` returns the finished ones alone: what failed stands in a queue, which is read after it.
- 0.26 does not mark a request that only tells prefill to free blocks (`awaiting_kvs`): it has no blocks of its own.
- 0.26 counts no failed handshakes; it tells them to `_log_failure` alone.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import msgspec
from vllm import SamplingParams, exceptions
from vllm.v1.engine.exceptions import EngineGenerateError

if TYPE_CHECKING:
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        DerenderChatRequestUnion,
        DerenderChatStreamRequest,
        DerenderChatStreamResponse,
        DerenderCompletionRequestUnion,
        DerenderCompletionStreamRequest,
        DerenderCompletionStreamResponse,
        ReasoningParserKwargs,
    )
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.entrypoints.serve.exception_handling.handlers.validation import (
        validation_exception_handler,
    )
    from vllm.renderers.chat_utils import (
        ConversationMessage,
        has_non_text_content,
        load_chat_template,
    )

__all__ = [
    "CLIENT_ERRORS",
    "FAILED_HANDSHAKES",
    "FULL_QUEUE_ERRORS",
    "REQUEST_ERRORS",
    "ConversationMessage",
    "DerenderChatRequestUnion",
    "DerenderChatStreamRequest",
    "DerenderChatStreamResponse",
    "DerenderCompletionRequestUnion",
    "DerenderCompletionStreamRequest",
    "DerenderCompletionStreamResponse",
    "ErrorResponse",
    "ReasoningParserKwargs",
    "RequestResponseMetadata",
    "accepted",
    "add_missing_counts",
    "awaits_kv",
    "count_failure",
    "create_error_response",
    "done_and_failed",
    "fail_pull",
    "has_non_text_content",
    "load_chat_template",
    "make_parser",
    "popped",
    "sampling_field",
    "structured_outputs_config",
    "validate_token_ids",
    "validation_exception_handler",
    "warm_up",
]


def _errors(*names: str) -> tuple[type[Exception], ...]:
    """Return those of vLLM's exceptions that this release has."""
    known = vars(exceptions)
    return tuple(known[name] for name in names if name in known)


CLIENT_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    *(
        _errors("VLLMClientError")
        or _errors("VLLMValidationError", "VLLMNotFoundError", "VLLMUnprocessableEntityError")
    ),
)
"""What vLLM raises for a request that is wrong."""

FULL_QUEUE_ERRORS = _errors("GracefulHTTPError")
"""What it raises where its queue is full; empty in releases that have no such limit."""

REQUEST_ERRORS = (*_errors("VLLMError"), EngineGenerateError)
"""What it raises for a request that went wrong in the engine."""


FAILED_HANDSHAKES = "num_failed_handshakes"


class _Absent:
    """A type of a later release: nothing is one."""


def _has_non_text_content(messages: Any) -> bool:
    """Return whether a part of any message is no text. See vLLM's `has_non_text_content`."""
    contents = [
        message.get("content") if isinstance(message, dict) else None
        for message in (messages if isinstance(messages, list) else [])
    ]
    media = frozenset(vars(importlib.import_module(_OLD_CHAT))["MM_PARSER_MAP"]) - _TEXT_PARTS
    return any(
        not media.isdisjoint(part) or part.get("type", "text") not in _TEXT_PARTS
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    )


_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
_PROTOCOL = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
_OLD_CHAT = "vllm.entrypoints.chat_utils"
_OLD_PROTOCOL = "vllm.entrypoints.openai.engine.protocol"

#: name → where it is, newest first: `(module, name there)`, or a stand-in
_PLACES: dict[str, tuple[Any, ...]] = {
    "has_non_text_content": (
        ("vllm.renderers.chat_utils", "has_non_text_content"),
        _has_non_text_content,
    ),
    "ErrorResponse": (
        ("vllm.entrypoints.serve.engine.protocol", "ErrorResponse"),
        (_OLD_PROTOCOL, "ErrorResponse"),
    ),
    "RequestResponseMetadata": (
        ("vllm.entrypoints.generate.base.protocol", "RequestResponseMetadata"),
        (_OLD_PROTOCOL, "RequestResponseMetadata"),
    ),
    "create_error_response": (
        (
            "vllm.entrypoints.serve.exception_handling.error_response",
            "create_error_response",
        ),
        ("vllm.entrypoints.serve.utils.error_response", "create_error_response"),
    ),
    "validation_exception_handler": (
        (
            "vllm.entrypoints.serve.exception_handling.handlers.validation",
            "validation_exception_handler",
        ),
        ("vllm.entrypoints.serve.utils.server_utils", "validation_exception_handler"),
    ),
    "load_chat_template": (
        ("vllm.renderers.chat_utils", "load_chat_template"),
        (_OLD_CHAT, "load_chat_template"),
    ),
    "ConversationMessage": (
        ("vllm.renderers.chat_utils", "ConversationMessage"),
        (_OLD_CHAT, "ConversationMessage"),
    ),
    "DerenderChatRequestUnion": (
        (_PROTOCOL, "DerenderChatRequestUnion"),
        (_PROTOCOL, "DerenderChatRequest"),
    ),
    "DerenderCompletionRequestUnion": (
        (_PROTOCOL, "DerenderCompletionRequestUnion"),
        (_PROTOCOL, "DerenderCompletionRequest"),
    ),
    "DerenderChatStreamRequest": ((_PROTOCOL, "DerenderChatStreamRequest"), _Absent),
    "DerenderChatStreamResponse": ((_PROTOCOL, "DerenderChatStreamResponse"), _Absent),
    "DerenderCompletionStreamRequest": ((_PROTOCOL, "DerenderCompletionStreamRequest"), _Absent),
    "DerenderCompletionStreamResponse": ((_PROTOCOL, "DerenderCompletionStreamResponse"), _Absent),
    "ReasoningParserKwargs": ((_PROTOCOL, "ReasoningParserKwargs"), dict),
}


def __getattr__(name: str) -> Any:
    """Return what a name of `_PLACES` is in this release; an engine's worker imports no server for it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for place in _PLACES[name]:
        if not isinstance(place, tuple):
            return place
        module, name_there = place
        try:
            found = vars(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # vLLM has the module, and something that it needs is missing
            continue
        if name_there in found:
            return found[name_there]
    raise ImportError(f"this vLLM has no {name}: looked in {_PLACES[name]}")


def sampling_field(params: SamplingParams, name: str) -> Any:
    """Return a field of sampling parameters; None where this release has no such field."""
    return msgspec.structs.asdict(params).get(name)


def accepted(call: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that `call` has: a later one, as `tool_strict_level`, is left out."""
    return {
        name: arguments[name] for name in inspect.signature(call).parameters if name in arguments
    }


def structured_outputs_config(args: Any) -> Any:
    """Return the engine arguments' configuration of structured outputs, with their reasoning parser in it."""
    if hasattr(args, "create_structured_outputs_config"):
        return args.create_structured_outputs_config()
    config = args.structured_outputs_config
    if args.reasoning_parser:
        config.reasoning_parser = args.reasoning_parser
    return config


def warm_up(renderer: Any) -> None:
    """Let the first request find templates and tokenizer ready, where this release can prepare them."""
    if hasattr(renderer, "warmup"):
        renderer.warmup()


def validate_token_ids(renderer: Any, token_ids: list[int], *, parameter: str) -> None:
    """Raise vLLM's validation error for a token ID outside the vocabulary."""
    if hasattr(renderer, "validate_token_ids"):
        renderer.validate_token_ids(token_ids, parameter=parameter)
        return
    largest = max(renderer.get_tokenizer().max_token_id, renderer.model_config.get_vocab_size() - 1)
    for token_id in token_ids:
        if not 0 <= token_id <= largest:
            message = f"Token id {token_id} is out of vocabulary"
            raise exceptions.VLLMValidationError(message, parameter=parameter, value=token_id)


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


def awaits_kv(meta: Any) -> bool:
    """Return whether a request of NIXL's metadata waits for blocks, and does not only free prefill's."""
    return bool(vars(meta).get("awaiting_kvs", any(meta.local_block_ids)))


def done_and_failed(popped: Any) -> tuple[set[str], set[str]]:
    """Return what `_pop_done_transfers` tells: the finished requests, and which of them failed."""
    return popped if isinstance(popped, tuple) else (popped, set())


def popped(worker: Any, done: set[str], failed: set[str]) -> Any:
    """Return from a worker's `_pop_done_transfers` what this release's caller takes."""
    if hasattr(worker, "_recv_failures"):
        return done, failed
    for request_id in failed:
        fail_pull(worker, request_id)
    return done


def fail_pull(worker: Any, request_id: str) -> None:
    """Let a pull fail that moves nothing, so that the scheduler hears of it; it counts as no failed transfer."""
    if hasattr(worker, "_recv_failures"):
        worker._handle_failed_transfer(request_id, None, worker._recv_failures, False)
    else:
        worker._handle_failed_transfer(request_id, None)


def add_missing_counts(data: dict[str, list[Any]]) -> None:
    """Add to NIXL's statistics what an older release does not count."""
    data.setdefault(FAILED_HANDSHAKES, [])


def count_failure(stats: Any, failure_type: str) -> None:
    """Count a failed handshake where vLLM itself does not."""
    if failure_type == "handshake_setup_failed" and not hasattr(stats, "record_failed_handshake"):
        stats.data[FAILED_HANDSHAKES].append(1)
