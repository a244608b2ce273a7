"""Questions about text and token IDs, answered by vLLM's own serving objects."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from headrace.engine import vllm_request
from headrace.engine.vllm_request import VllmRequest
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import ErrorResponse
from headrace.engine.vllm_versions_text import validate_token_ids
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import Ask

_tokenize: TypeAdapter[Any] = TypeAdapter(TokenizeRequest)
_detokenize: TypeAdapter[Any] = TypeAdapter(DetokenizeRequest)


class VllmAnswers:
    """`/tokenize`, `/detokenize` and the two `…/render` of a `vllm serve` with the same settings."""

    def __init__(self, stack: TextStack, serving: ServingRender) -> None:
        self._stack = stack
        self._render = serving
        frontend = stack.frontend
        self._tokenization = ServingTokenization(
            stack.models,
            stack.online_renderer,
            chat_template=frontend["chat_template"],
            chat_template_content_format=frontend["chat_template_content_format"],
            default_chat_template_kwargs=frontend["default_chat_template_kwargs"],
        )

    async def answer(self, ask: Ask) -> bytes:
        """Return the body of the answer. Raises: RequestError in vLLM's words; any other error is vLLM's own."""
        if ask.endpoint == "tokenize":
            request = vllm_request.validated(_tokenize, ask.body)
            return _body(await self._tokenization.create_tokenize(request, None))
        if ask.endpoint == "detokenize":
            request = vllm_request.validated(_detokenize, ask.body)
            validate_token_ids(self._stack.renderer, request.tokens, parameter="tokens")
            return _body(await self._tokenization.create_detokenize(request, None))
        if ask.endpoint == "chat.completions.render":
            return await self._rendered(vllm_request.parse("chat.completions", ask.body), ask)
        if ask.endpoint == "completions.render":
            return await self._rendered(vllm_request.parse("completions", ask.body), ask)
        raise BadRequestError(f"render does not answer {ask.endpoint!r}")

    async def _rendered(self, request: VllmRequest, ask: Ask) -> bytes:
        vllm_request.check_supported(request)
        if ask.is_own_id or "request_id" not in request.model_fields_set:
            request.request_id = ask.request_id
        if isinstance(request, ChatCompletionRequest):
            return _body(await self._render.render_chat_request(request))
        return _body(await self._render.render_completion_request(request))


def _body(answer: Any) -> bytes:
    """Return what vLLM's router makes of a response object. Raises: RequestError for its error object."""
    if isinstance(answer, ErrorResponse):
        raise vllm_request.response_error(answer)
    items = (
        [item.model_dump() for item in answer] if isinstance(answer, list) else answer.model_dump()
    )
    return bytes(JSONResponse(items).body)
