"""Answers made of token IDs that a client brings, by vLLM's own derender serving object."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from vllm.entrypoints.scale_out.derender.serving import ServingDerender
from vllm.renderers.online_derenderer import OnlineDerenderer

from headrace.engine import vllm_request
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import (
    DerenderChatRequestUnion,
    DerenderChatStreamRequest,
    DerenderChatStreamResponse,
    DerenderCompletionRequestUnion,
    DerenderCompletionStreamRequest,
    DerenderCompletionStreamResponse,
    ErrorResponse,
)
from headrace.engine.vllm_versions_text import validate_token_ids
from headrace.shared.errors import BadRequestError, RequestError
from headrace.shared.messages import Ask

_chat: TypeAdapter[Any] = TypeAdapter(DerenderChatRequestUnion)
_completion: TypeAdapter[Any] = TypeAdapter(DerenderCompletionRequestUnion)


class VllmAnswers:
    """The two `…/derender` of a `vllm serve` with the same settings."""

    def __init__(self, stack: TextStack) -> None:
        self._renderer = stack.renderer
        self.derenderer = OnlineDerenderer(
            model_config=stack.model_config,
            renderer=stack.renderer,
            reasoning_parser=stack.reasoning_parser or None,
            **stack.frontend,
        )
        self._serving = ServingDerender(stack.models, self.derenderer)

    async def answer(self, ask: Ask) -> bytes:
        """Return the body of the answer. Raises: RequestError in vLLM's words."""
        try:
            if ask.endpoint == "chat.completions.derender":
                return await self._chat(vllm_request.validated(_chat, ask.body))
            if ask.endpoint == "completions.derender":
                return await self._completion(vllm_request.validated(_completion, ask.body))
        except RequestError:
            raise
        except Exception as error:
            raise vllm_request.request_error(error) from error
        raise BadRequestError(f"derender does not answer {ask.endpoint!r}")

    async def _chat(self, request: Any) -> bytes:
        if not isinstance(request, DerenderChatStreamRequest):
            self._check_token_ids(request.generate_response.choices)
            return _body(await self._serving.derender_chat_response(request))
        self._check_token_ids(request.generate_chunk.choices)
        result = await self._serving.derender_chat_stream_response(request)
        if isinstance(result, ErrorResponse):
            raise vllm_request.response_error(result)
        return _body(DerenderChatStreamResponse(chunk=result[0], stream_state=result[1]))

    async def _completion(self, request: Any) -> bytes:
        if not isinstance(request, DerenderCompletionStreamRequest):
            for response in request.generate_responses:
                self._check_token_ids(response.choices)
            return _body(await self._serving.derender_completion_response(request))
        self._check_token_ids(request.generate_chunk.choices)
        result = await self._serving.derender_completion_stream_response(request)
        if isinstance(result, ErrorResponse):
            raise vllm_request.response_error(result)
        return _body(DerenderCompletionStreamResponse(chunk=result[0], stream_state=result[1]))

    def _check_token_ids(self, choices: list[Any]) -> None:
        for choice in choices:
            validate_token_ids(self._renderer, choice.token_ids or [], parameter="token_ids")


def _body(answer: Any) -> bytes:
    """Return what vLLM's router makes of a response object. Raises: RequestError for its error object."""
    if isinstance(answer, ErrorResponse):
        raise vllm_request.response_error(answer)
    return bytes(JSONResponse(answer.model_dump()).body)
