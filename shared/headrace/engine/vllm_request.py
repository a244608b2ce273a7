"""A request's body, checked as vLLM's own server checks it; errors have its status, type, message and param."""

from __future__ import annotations

import json
import logging
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from headrace.engine.vllm_versions import (
    ErrorResponse,
    create_error_response,
    has_non_text_content,
    validation_exception_handler,
)
from headrace.shared.errors import BadRequestError, ModelNotFoundError, RequestError
from headrace.shared.messages import Endpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

VllmRequest: TypeAlias = ChatCompletionRequest | CompletionRequest

ROLES = ("system", "assistant", "user", "function", "tool", "developer")

_ADAPTERS: dict[Endpoint, TypeAdapter[Any]] = {
    "chat.completions": TypeAdapter(ChatCompletionRequest),
    "completions": TypeAdapter(CompletionRequest),
}
_SET_HERE = ("kv_transfer_params", "ec_transfer_params")
_HANDLER_REQUEST = cast(
    Request,
    SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False)))
    ),
)


def parse(endpoint: Endpoint, body: bytes) -> VllmRequest:
    """Return vLLM's request object for the body of a chat or a completion. Raises: as `validated`."""
    request: VllmRequest = validated(_ADAPTERS[endpoint], body)
    return request


def validated(adapter: TypeAdapter[Any], body: bytes) -> Any:
    """Return the request object that vLLM's router makes of a body.

    Raises: BadRequestError for what is no JSON, no object, or has a field that vLLM refuses.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant) if body else None
    except json.JSONDecodeError as error:
        raise _not_json(error.msg, error.pos) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, a NaN, or nested too deep
        raise _not_json(str(error), 0) from None
    if value is None:
        missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise _invalid([missing])
    try:
        # from_attributes: so FastAPI validates, and the words of its errors depend on it.
        return adapter.validate_python(value, from_attributes=True)
    except ValidationError as error:
        found: Any = error.errors(include_url=False)
        raise _invalid([{**item, "loc": ("body", *item["loc"])} for item in found]) from None
    except Exception as error:
        raise request_error(error) from error


def check_supported(request: VllmRequest) -> None:
    """Refuse what vLLM's server would take and this pipeline would answer wrongly, or not at all.

    Raises: BadRequestError naming the field.
    """
    check_transfer_params(request, request.vllm_xargs)
    if request.use_beam_search:
        raise BadRequestError("beam search is not supported", param="use_beam_search")
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    else:
        _check_completion(request)


def check_transfer_params(request: Any, extra: Mapping[str, Any] | None) -> None:
    """Refuse the handles by which engines pull from one another: they are the server's, and each is good once.

    Raises: BadRequestError naming the field, of the request or of `extra`.
    """
    for name in _SET_HERE:
        if getattr(request, name) or name in (extra or {}):
            raise BadRequestError(f"{name} is set by the server and can't be given", param=name)


def _check_chat(request: ChatCompletionRequest) -> None:
    if has_non_text_content(request.messages):
        raise BadRequestError(
            "only text content is supported: no images, audio, video or files", param="messages"
        )
    for index, message in enumerate(request.messages):
        role = message.get("role") if isinstance(message, dict) else message.role
        if role not in ROLES:
            # Templates drop a message of a role they don't know; these are OpenAI's words.
            supported = f"{', '.join(map(repr, ROLES[:-1]))}, and {ROLES[-1]!r}"
            raise BadRequestError(
                f"Invalid value: {role!r}. Supported values are: {supported}.",
                param=f"messages[{index}].role",
            )


def _check_completion(request: CompletionRequest) -> None:
    if request.prompt_embeds is not None:
        raise BadRequestError("prompt_embeds is not supported", param="prompt_embeds")


def request_error(error: Exception) -> RequestError:
    """Return what vLLM's server would answer to an exception; an unexpected one is logged."""
    made = response_error(create_error_response(error))
    if made.http_status >= 500:
        logger.error("request failed", extra={"action": "request_failed"}, exc_info=error)
    return made


def response_error(response: ErrorResponse) -> RequestError:
    """Return vLLM's error response as an exception."""
    info = response.error
    kind: type[RequestError] = BadRequestError if info.code < 500 else RequestError
    made = (ModelNotFoundError if info.code == 404 else kind)(info.message, param=info.param)
    made.http_status, made.error_type = info.code, info.type
    return made


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits for anything.

    Raises: RuntimeError when it does wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine} waits, which it must not do here")


def _invalid(errors: list[dict[str, Any]]) -> RequestError:
    response = run_now(
        validation_exception_handler(_HANDLER_REQUEST, RequestValidationError(errors))
    )
    return response_error(ErrorResponse.model_validate_json(bytes(response.body)))


def _not_json(reason: str, position: int) -> RequestError:
    return _invalid(
        [
            {
                "type": "json_invalid",
                "loc": ("body", position),
                "msg": "JSON decode error",
                "input": {},
                "ctx": {"error": reason},
            }
        ]
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
