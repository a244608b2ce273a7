"""What `vllm serve` itself answers: its serving objects and error handlers, and an engine that plays back IDs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import ErrorResponse

from . import error_handlers


class PlaybackEngine:
    """Answers every request with the same token IDs, all in one engine step."""

    errored = False

    def __init__(self, stack: TextStack, token_ids: list[int]) -> None:
        self.model_config = stack.model_config
        self.vllm_config = stack.vllm_config
        self.renderer = stack.renderer
        self.input_processor = stack.input_processor
        self._token_ids = token_ids

    def check_admission(self, n: int) -> None:
        pass

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        request = self.input_processor.process_inputs(request_id, prompt, params, ("generate",))
        request.external_req_id = request_id
        processor = OutputProcessor(self.renderer.get_tokenizer(), log_stats=False)
        processor.add_request(request, prompt.get("prompt"))
        step = EngineCoreOutput(request_id, list(self._token_ids), finish_reason=FinishReason.STOP)
        if params.num_logprobs is not None:
            step.new_logprobs = LogprobsLists(*_columns(self._token_ids, params.num_logprobs))
        if params.prompt_logprobs is not None:
            given = _columns(request.prompt_token_ids[1:], params.prompt_logprobs)
            step.new_prompt_logprobs_tensors = LogprobsTensors(*map(torch.from_numpy, given))
        for output in processor.process_outputs([step]).request_outputs:
            assert isinstance(output, RequestOutput)
            yield output


def scores(token_id: int, num: int) -> tuple[list[int], list[float], int]:
    """Return what the engine says of a token ID: IDs, logprobs, its own rank. Every other ID is the likeliest."""
    likeliest = [504 + index for index in range(num)]
    logprob, rank = -3.5, 77
    if token_id % 2 and num:
        likeliest[0], logprob, rank = token_id, -0.125, 1
    return [token_id, *likeliest], [logprob, *(-0.125 - index for index in range(num))], rank


def _columns(token_ids: list[int], num: int) -> list[Any]:
    rows = [scores(token_id, num) for token_id in token_ids]
    shape = (len(rows), num + 1)
    return [
        np.array([row[0] for row in rows], dtype=np.int64).reshape(shape),
        np.array([row[1] for row in rows], dtype=np.float32).reshape(shape),
        np.array([row[2] for row in rows], dtype=np.int64),
    ]


def record_requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that gets each request as vLLM's generator of whole chats receives it."""
    seen: list[dict[str, Any]] = []
    original = OpenAIServingChat.chat_completion_full_generator

    def record(self: Any, request: ChatCompletionRequest, *args: Any, **kwargs: Any) -> Any:
        seen.append({**request.model_dump(), "private": request.__pydantic_private__})
        del seen[-1]["request_id"]
        return original(self, request, *args, **kwargs)

    monkeypatch.setattr(OpenAIServingChat, "chat_completion_full_generator", record)
    return seen


class Reference:
    """vLLM's server for one model, without HTTP."""

    def __init__(self, stack: TextStack, token_ids: list[int] = []) -> None:  # noqa: B006
        engine = cast(EngineClient, PlaybackEngine(stack, token_ids))
        models = cast(OpenAIServingModels, stack.models)
        self._chat = OpenAIServingChat(
            engine,
            models,
            "assistant",
            online_renderer=stack.online_renderer,
            reasoning_parser=stack.reasoning_parser,
            **stack.frontend,
        )
        self._completion = OpenAIServingCompletion(
            engine, models, online_renderer=stack.online_renderer, request_logger=None
        )

    async def chat(self, body: dict[str, Any]) -> Any:
        """Return the response object of a whole chat."""
        return await self._chat.create_chat_completion(ChatCompletionRequest.model_validate(body))

    async def completion(self, body: dict[str, Any]) -> Any:
        """Return the response object of a whole completion, or the lines of a streamed one."""
        answer = await self._completion.create_completion(CompletionRequest.model_validate(body))
        return [line async for line in answer] if isinstance(answer, AsyncGenerator) else answer

    def app(self) -> FastAPI:
        """Return an app with vLLM's error handlers in front of its serving objects."""
        app = FastAPI()
        app.state.args = SimpleNamespace(log_error_stack=False)
        error_handlers.add(app)

        @app.post("/chat.completions")
        async def chat(request: ChatCompletionRequest) -> JSONResponse:
            return _response(await self._chat.create_chat_completion(request))

        @app.post("/completions")
        async def completions(request: CompletionRequest) -> JSONResponse:
            return _response(await self._completion.create_completion(request))

        return app


def _response(answer: Any) -> JSONResponse:
    status = answer.error.code if isinstance(answer, ErrorResponse) else 200
    return JSONResponse(answer.model_dump(), status_code=status)
