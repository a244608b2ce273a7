"""Where vLLM 0.26 to 0.33 differ for us: every name that moved, every field and rule that came later.

The other files read as for the newest release. What an older one lacks is made up for here, in `vllm_versions_text`
(render and derender) and in `nixl_versions` (its list is there), by looking for the thing itself and not at a version
number. A number says with which release a thing came.

Names that moved (`_PLACES`): the validation handler and the maker of error responses (0.28), the error response and
the metadata of a response (0.29), chat messages, their templates and the test for content that is no text (0.32).
Names with a stand-in where they lack: streamed derender requests and responses (0.27).

Errors: `VLLMError` and `VLLMClientError` (0.27). Until then errors of the client are three classes, two of them
`ValueError`s, and an engine's failure of one request is an `EngineGenerateError`. Refusal by a full queue (0.29).

Configuration: `tool_strict_level` (0.31; until then a setting other than "auto" is refused); the reasoning parser in
the configuration of structured outputs wherever that is made (0.32).

Serving objects: warm-up (0.27), the method that makes a choice's parser (0.31), the check of a prompt's token IDs
(0.32), derender's renderer within that of `/inference/v1/generate` (0.33).

Chats and the Responses API: `OnlineRenderer` takes a prompt's IDs instead of rendering anew (0.27; until then a
renderer that has them already is put into it); rendering tells whether reasoning has ended, and the arguments of its
parser (0.32; until then the rules of vLLM's chat server are applied).

Sampling parameters: `trace_decode_token_ids` (0.29), `watermarking` (0.30).

What stays as that release's own server has it: rendered requests have random IDs, and `/derender` asks for the model
(until 0.32), and has no streams of chats with parsers; with 0.26 it has none at all, and a streamed answer that never
ends its reasoning ends with the stop token's text.
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
    "RequestResponseMetadata",
    "accepted",
    "create_error_response",
    "has_non_text_content",
    "load_chat_template",
    "sampling_field",
    "structured_outputs_config",
    "validation_exception_handler",
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
