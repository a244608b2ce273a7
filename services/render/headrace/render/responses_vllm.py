"""Requests of the Responses API, rendered by the code with which vLLM's server answers them."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from headrace.engine import vllm_request, vllm_responses
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import ErrorResponse
from headrace.engine.vllm_versions_text import tell_reasoning
from headrace.render.tokenize_vllm import entries_of


class ResponsesRenderer:
    """Stops where vLLM's server would hand the prompt to its engine."""

    def __init__(self, stack: TextStack) -> None:
        self._serving = vllm_responses.serving(stack)
        self._serving._generate_with_builtin_tools = _given
        self._serving.responses_full_generator = _whole
        self._serving.responses_stream_generator = _result_generator

    async def generate_request(self, body: bytes, tenant: str) -> GenerateRequest:
        """Return what the engine would be given. `tenant`: as for the renderer's `render`.

        Raises: RequestError in vLLM's words, or for what this pipeline can't do.
        """
        request = vllm_responses.parse(body)
        vllm_responses.check_supported(request)
        with entries_of(tenant, request.cache_salt):
            given: Any = await self._serving.create_responses(request)
        if isinstance(given, ErrorResponse):
            raise vllm_request.response_error(given)
        generate = GenerateRequest(
            token_ids=list(given["engine_input"]["prompt_token_ids"]),
            sampling_params=given["sampling_params"],
            model=request.model,
            stream=bool(request.stream),
            cache_salt=request.cache_salt,
            priority=given["priority"],
        )
        tell_reasoning(generate, None, given["reasoning_parser_kwargs"])
        return generate


def _given(**given: Any) -> dict[str, Any]:
    """Return the arguments of a generation instead of its outputs."""
    return given


async def _whole(*args: Any) -> Any:
    return _result_generator(*args)


def _result_generator(request: Any, sampling_params: Any, result_generator: Any, *args: Any) -> Any:
    return result_generator
