"""vLLM's own template, tokenizer and validation, without an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.inputs import tokens_input

from headrace.engine import vllm_request, vllm_text
from headrace.engine.vllm_request import VllmRequest
from headrace.engine.vllm_text import TextStack
from headrace.render.renderer import Rendered
from headrace.shared import token_ids
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import RequestError
from headrace.shared.messages import Endpoint, Prompt
from headrace.shared.settings import Settings

T = TypeVar("T")

# A prompt without a token ID gets other words from vLLM's render code than from its server.
_EMPTY = "No token_ids rendered"
_EMPTY_IN_VLLMS_SERVER = "The decoder prompt cannot be empty"


class VllmRenderer:
    """A `Renderer` that runs vLLM's render code on a thread of its own.

    The thread has its own event loop: validation, template and tokenizer are CPU work, and a large request
    must not keep the service from acknowledging messages.
    """

    def __init__(self, settings: Settings) -> None:
        self.contract = contract(settings, engine="vllm")
        self.served_name = served_name(settings)
        self.max_model_len = 0
        self._settings = settings
        self._thread: _LoopThread | None = None
        self._pipeline: _Pipeline | None = None

    async def start(self) -> None:
        self._thread = _LoopThread("headrace-render")
        self._pipeline = await self._thread.run(self._load())
        self.max_model_len = self._pipeline.max_model_len

    async def _load(self) -> _Pipeline:
        stack = vllm_text.load(self._settings)
        stack.online_renderer.warmup()
        return _Pipeline(stack)

    async def render(self, endpoint: Endpoint, body: bytes) -> Rendered:
        if self._thread is None or self._pipeline is None:
            raise RuntimeError("render() before start()")
        return await self._thread.run(self._pipeline.render(endpoint, body))

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = self._pipeline = None


class _Pipeline:
    """One request, from bytes to token IDs; runs on the render thread."""

    def __init__(self, stack: TextStack) -> None:
        self.max_model_len = stack.model_config.max_model_len
        self._stack = stack
        self._serving = ServingRender(stack.models, stack.online_renderer)

    async def render(self, endpoint: Endpoint, body: bytes) -> Rendered:
        request = vllm_request.parse(endpoint, body)
        vllm_request.check_supported(request)
        try:
            return await self._rendered(request)
        except RequestError:
            raise
        except Exception as error:
            raise vllm_request.request_error(error) from error

    async def _rendered(self, request: VllmRequest) -> Rendered:
        result: GenerateRequest | list[GenerateRequest] | ErrorResponse
        if isinstance(request, ChatCompletionRequest):
            result = await self._serving.render_chat_request(request)
        else:
            result = await self._serving.render_completion_request(request)
        if isinstance(result, ErrorResponse):
            if result.error.message == _EMPTY:
                result.error.message = _EMPTY_IN_VLLMS_SERVER
            raise vllm_request.response_error(result)
        generates = result if isinstance(result, list) else [result]
        return Rendered(
            prompts=tuple(self._prompt(generate) for generate in generates),
            n=request.n or 1,
            stream=bool(request.stream),
            priority=request.priority,
        )

    def _prompt(self, generate: GenerateRequest) -> Prompt:
        self._check_as_engine(generate)
        kwargs = generate.reasoning_parser_kwargs
        return Prompt(
            token_ids=token_ids.pack(generate.token_ids),
            sampling_params=msgspec.msgpack.encode(generate.sampling_params),
            cache_salt=generate.cache_salt,
            reasoning_ended=generate.reasoning_ended,
            reasoning_parser_kwargs=None if kwargs is None else kwargs.model_dump(),
        )

    def _check_as_engine(self, generate: GenerateRequest) -> None:
        """Run the checks of vLLM's engine front here, where the client still gets an HTTP status."""
        # vLLM's own server leaves the IDs of `prompt=[1, 2]` to the engine, and an engine can die of them.
        self._stack.renderer.validate_token_ids(generate.token_ids, parameter="prompt")
        self._stack.input_processor.process_inputs(
            generate.request_id,
            tokens_input(generate.token_ids, cache_salt=generate.cache_salt),
            generate.sampling_params,
            ("generate",),
        )


class _LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the thread; cancelling the call cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
