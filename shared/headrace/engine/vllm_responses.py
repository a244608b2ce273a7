"""The Responses API: what render and derender share of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pydantic import TypeAdapter
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_input_messages

from headrace.engine import vllm_request
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import has_non_text_content
from headrace.shared.errors import BadRequestError

_adapter: TypeAdapter[Any] = TypeAdapter(ResponsesRequest)
_NEEDS_STORE = ("background", "previous_response_id", "previous_input_messages")


def serving(stack: TextStack) -> OpenAIServingResponses:
    """Return vLLM's serving object, with a stand-in where it asks for an engine."""
    engine = SimpleNamespace(
        model_config=stack.model_config,
        vllm_config=stack.vllm_config,
        renderer=stack.renderer,
        input_processor=stack.input_processor,
        errored=False,
        check_admission=lambda num_sequences: None,
    )
    frontend = {name: value for name, value in stack.frontend.items() if name != "request_logger"}
    return OpenAIServingResponses(
        cast(EngineClient, engine),
        cast(OpenAIServingModels, stack.models),
        stack.online_renderer,
        request_logger=None,
        reasoning_parser=stack.reasoning_parser,
        **frontend,
    )


def parse(body: bytes) -> ResponsesRequest:
    """Return vLLM's request object for a body. Raises: as `vllm_request.validated`."""
    request: ResponsesRequest = vllm_request.validated(_adapter, body)
    return request


def check_supported(request: ResponsesRequest) -> None:
    """Refuse what would be answered wrongly, or not at all.

    Raises: BadRequestError naming the field.
    """
    for name in _NEEDS_STORE:
        if getattr(request, name):
            raise BadRequestError(
                f"{name} is not supported: only the HTTP API keeps responses; send the whole"
                " conversation as input",
                param=name,
            )
    if request.store and "store" in request.model_fields_set:
        raise BadRequestError(
            "store is not supported: only the HTTP API keeps responses; send false, or leave it out",
            param="store",
        )
    vllm_request.check_transfer_params(request, request.vllm_xargs)
    if request.enable_response_messages:
        raise BadRequestError(
            "enable_response_messages is not supported", param="enable_response_messages"
        )
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    if has_non_text_content(messages):
        raise BadRequestError(
            "only text content is supported: no images, audio, video or files", param="input"
        )
