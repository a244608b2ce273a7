"""Token IDs that a client brings itself, checked as vLLM's server checks them before its engine."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.sampling_params import RequestOutputKind

from headrace.engine import vllm_request
from headrace.engine.vllm_versions import sampling_field
from headrace.shared.errors import BadRequestError

_generate: TypeAdapter[Any] = TypeAdapter(GenerateRequest)
_NOT_TEXT = ("features", "content_parts")
_NOT_CARRIED = ("prompt_logprob_token_ids", "prompt_logprob_start")


async def generate_request(serving: ServingRender, body: bytes) -> GenerateRequest:
    """Return the request with the defaults that vLLM's server would add.

    Raises: RequestError in vLLM's words, or for what this pipeline can't do.
    """
    request: GenerateRequest = vllm_request.validated(_generate, body)
    error = await serving._check_model(request)
    if error is not None:
        raise vllm_request.response_error(error)
    params = request.sampling_params
    vllm_request.check_transfer_params(request, params.extra_args)
    _check_supported(request)
    if not request.is_sampling_param_provided("max_tokens"):
        params.max_tokens = get_max_tokens(
            max_model_len=serving.model_config.max_model_len,
            max_tokens=None,
            input_length=len(request.token_ids),
            default_sampling_params=serving.default_sampling_params,
            override_max_tokens=serving.override_max_tokens,
        )
    # An engine would stop at the end of its context too; a job says beforehand how much it needs.
    room = serving.model_config.max_model_len - len(request.token_ids)
    params.max_tokens = min(params.max_tokens or room, max(room, 1))
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = False  # how an engine keeps them in memory; nothing of it is on the wire
    return request


def _check_supported(request: GenerateRequest) -> None:
    for name in _NOT_TEXT:
        if vars(request).get(name):
            raise BadRequestError(
                "only text is supported: no images, audio, video or files", param=name
            )
    if vars(request).get("output_mode") == "derender":  # since 0.33
        raise BadRequestError(
            "output_mode 'derender' is not supported: send the answer to /v1/chat/completions/derender",
            param="output_mode",
        )
    for name in _NOT_CARRIED:
        if sampling_field(request.sampling_params, name) is not None:
            raise BadRequestError(f"{name} is not supported", param=f"sampling_params.{name}")
