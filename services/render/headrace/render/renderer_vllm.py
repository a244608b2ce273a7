"""vLLM's own template, tokenizer and validation, without an engine."""

from __future__ import annotations

import msgspec
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.inputs import tokens_input

from headrace.engine import vllm_request, vllm_text
from headrace.engine.loop_thread import LoopThread
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import ErrorResponse
from headrace.engine.vllm_versions_text import (
    add_reasoning,
    reasoning,
    validate_token_ids,
    warm_up,
)
from headrace.render import tokenize_vllm
from headrace.render.ask_vllm import VllmAnswers
from headrace.render.generate_vllm import generate_request
from headrace.render.renderer import Rendered
from headrace.render.responses_vllm import ResponsesRenderer
from headrace.render.tokenize_vllm import entries_of
from headrace.shared import prompt_logprobs, token_ids
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import RequestError
from headrace.shared.messages import Ask, Endpoint, Prompt
from headrace.shared.settings import Settings

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
        self._thread: LoopThread | None = None
        self._pipeline: _Pipeline | None = None

    async def start(self) -> None:
        self._thread = LoopThread("headrace-render")
        self._pipeline = await self._thread.run(self._load())
        self.max_model_len = self._pipeline.max_model_len

    async def _load(self) -> _Pipeline:
        stack = vllm_text.load(self._settings)
        warm_up(stack.online_renderer)
        if self._settings.render.cache_bytes:
            tokenize_vllm.install(stack.renderer, self._settings.render.cache_bytes)
        return _Pipeline(stack)

    async def render(self, endpoint: Endpoint, body: bytes, tenant: str = "") -> Rendered:
        if self._thread is None or self._pipeline is None:
            raise RuntimeError("render() before start()")
        return await self._thread.run(self._pipeline.render(endpoint, body, tenant))

    async def ask(self, ask: Ask) -> bytes:
        if self._thread is None or self._pipeline is None:
            raise RuntimeError("ask() before start()")
        return await self._thread.run(self._pipeline.ask(ask))

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
        self._responses = ResponsesRenderer(stack)
        self._answers = VllmAnswers(stack, self._serving)

    async def render(self, endpoint: Endpoint, body: bytes, tenant: str) -> Rendered:
        try:
            return self._packed(await self._generates(endpoint, body, tenant))
        except RequestError:
            raise
        except Exception as error:
            raise vllm_request.request_error(error) from error

    async def ask(self, ask: Ask) -> bytes:
        try:
            return await self._answers.answer(ask)
        except RequestError:
            raise
        except Exception as error:
            raise vllm_request.request_error(error) from error

    async def _generates(
        self, endpoint: Endpoint, body: bytes, tenant: str
    ) -> list[GenerateRequest]:
        """Return what vLLM's engine would be given, one a prompt."""
        if endpoint == "generate":
            return [await generate_request(self._serving, body)]
        if endpoint == "responses":
            return [await self._responses.generate_request(body, tenant)]
        request = vllm_request.parse(endpoint, body)
        vllm_request.check_supported(request)
        result: GenerateRequest | list[GenerateRequest] | ErrorResponse
        with entries_of(tenant, request.cache_salt):
            if isinstance(request, ChatCompletionRequest):
                result = await self._serving.render_chat_request(request)
            else:
                result = await self._serving.render_completion_request(request)
        if isinstance(result, ErrorResponse):
            if result.error.message == _EMPTY:
                result.error.message = _EMPTY_IN_VLLMS_SERVER
            raise vllm_request.response_error(result)
        if isinstance(request, ChatCompletionRequest) and isinstance(result, GenerateRequest):
            add_reasoning(self._stack.online_renderer, request, result)
        return result if isinstance(result, list) else [result]

    def _packed(self, generates: list[GenerateRequest]) -> Rendered:
        prompts = tuple(self._prompt(generate) for generate in generates)
        first = generates[0]
        prompt_logprobs.check_size(
            (token_ids.count(prompt.token_ids) for prompt in prompts),
            prompts[0].prompt_logprobs,
            num_choices=first.sampling_params.n,
            vocab_size=self._stack.model_config.get_vocab_size(),
        )
        return Rendered(
            prompts=prompts,
            n=first.sampling_params.n,
            stream=bool(first.stream),
            priority=first.priority,
        )

    def _prompt(self, generate: GenerateRequest) -> Prompt:
        self._check_as_engine(generate)
        reasoning_ended, reasoning_parser_kwargs = reasoning(generate)
        return Prompt(
            token_ids=token_ids.pack(generate.token_ids),
            sampling_params=msgspec.msgpack.encode(generate.sampling_params),
            cache_salt=generate.cache_salt,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            prompt_logprobs=generate.sampling_params.prompt_logprobs,
        )

    def _check_as_engine(self, generate: GenerateRequest) -> None:
        """Run the checks of vLLM's engine front here, where the client still gets an HTTP status."""
        # vLLM's own server leaves the IDs of `prompt=[1, 2]` to the engine, and an engine can die of them.
        validate_token_ids(self._stack.renderer, generate.token_ids, parameter="prompt")
        self._stack.input_processor.process_inputs(
            generate.request_id,
            tokens_input(generate.token_ids, cache_salt=generate.cache_salt),
            generate.sampling_params,
            ("generate",),
        )
