"""vLLM's own answer generators, fed with token IDs from the wire: chunks and bodies are those of `vllm serve`."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from pydantic import TypeAdapter
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams

from headrace.derender.answer import Results, StreamedAnswer, WholeAnswer
from headrace.derender.ask_vllm import VllmAnswers
from headrace.derender.renderer import AnswerStream
from headrace.derender.responses_vllm import ResponsesServer
from headrace.engine import vllm_request, vllm_text
from headrace.engine.loop_thread import LoopThread
from headrace.engine.vllm_outputs import Outputs, PromptParams
from headrace.engine.vllm_request import VllmRequest
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import (
    ConversationMessage,
    ErrorResponse,
    RequestResponseMetadata,
    accepted,
)
from headrace.engine.vllm_versions_text import make_parser, with_prompt
from headrace.shared import token_ids as packed
from headrace.shared.contract import contract
from headrace.shared.errors import BadRequestError
from headrace.shared.messages import Ask, Job
from headrace.shared.settings import Settings

_generate: TypeAdapter[Any] = TypeAdapter(GenerateRequest)
_params_decoder = msgspec.msgpack.Decoder(SamplingParams)


class VllmDerenderer:
    """A `Derenderer` on the serving objects of vLLM's OpenAI server."""

    def __init__(self, settings: Settings) -> None:
        self.contract = contract(settings, engine="vllm")
        self._settings = settings
        self._server: _Server | None = None
        self._thread: LoopThread | None = None

    async def start(self) -> None:
        # On the thread, for loading takes longer than the broker waits for a sign of life.
        self._thread = LoopThread("headrace-derender-ask")
        self._server = await self._thread.run(self._load())

    async def _load(self) -> _Server:
        return _Server(vllm_text.load(self._settings), self.contract)

    def open(self, job: Job) -> AnswerStream:
        if self._server is None:
            raise RuntimeError("open() before start()")
        return self._server.open(job)

    async def ask(self, ask: Ask) -> bytes:
        if self._server is None or self._thread is None:
            raise RuntimeError("ask() before start()")
        return await self._thread.run(self._server.answers.answer(ask))

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._server = self._thread = None


class _Server:
    """vLLM's serving objects, with a stand-in where they ask for an engine."""

    def __init__(self, stack: TextStack, contract: str) -> None:
        self.stack = stack
        self.tokenizer = stack.renderer.get_tokenizer()
        engine = cast(
            EngineClient,
            SimpleNamespace(
                model_config=stack.model_config,
                vllm_config=stack.vllm_config,
                renderer=stack.renderer,
                input_processor=stack.input_processor,
            ),
        )
        models = cast(OpenAIServingModels, stack.models)
        self.chat = OpenAIServingChat(
            engine,
            models,
            "assistant",
            online_renderer=stack.online_renderer,
            reasoning_parser=stack.reasoning_parser,
            **stack.frontend,
        )
        self.completion = OpenAIServingCompletion(
            engine,
            models,
            online_renderer=stack.online_renderer,
            request_logger=None,
        )
        self.answers = VllmAnswers(stack)
        sides = {
            "online_renderer": stack.online_renderer,
            "online_derenderer": self.answers.derenderer,
        }
        self.tokens = ServingTokens(
            engine, models, request_logger=None, **accepted(ServingTokens, sides)
        )
        self.responses = ResponsesServer(stack)
        # vLLM's own would differ between render, prefill and decode; the contract is what they share.
        self.chat.system_fingerprint = self.completion.system_fingerprint = (
            f"headrace-{contract[:12]}"
        )

    def open(self, job: Job) -> AnswerStream:
        if job.endpoint == "generate":
            return self._open_generate(job)
        if job.endpoint == "responses":
            prompt = _prompt_params(job, 0, None)
            outputs = Outputs(self.tokenizer, [prompt], job.n)
            return self.responses.open(job, outputs, prompt.token_ids)
        request = vllm_request.parse(job.endpoint, job.body)
        if isinstance(request, ChatCompletionRequest):
            conversation, text = self._templated(request)
            prompts = [_prompt_params(job, 0, text)]
            return self._open_chat(job, request, prompts, conversation)
        texts = self._echoed(request, job)
        prompts = [_prompt_params(job, index, text) for index, text in enumerate(texts)]
        return self._open_completion(job, request, prompts)

    def _open_chat(
        self,
        job: Job,
        request: ChatCompletionRequest,
        prompts: list[PromptParams],
        conversation: list[ConversationMessage],
    ) -> AnswerStream:
        template_kwargs = self.chat._effective_chat_template_kwargs(request)
        parser = None
        if self.chat.parser_cls is not None:
            parser = make_parser(self.chat, request, self.tokenizer, template_kwargs)
        self._adjust(request, prompts[0].token_ids)
        request_id = f"chatcmpl-{_public_id(request, job)}"
        outputs = Outputs(self.tokenizer, prompts, job.n)
        common: tuple[Any, ...] = (
            request_id,
            job.model,
            conversation,
            self.tokenizer,
            RequestResponseMetadata(request_id=request_id),
        )
        results = Results(indexed=False)
        if job.stream:
            lines = self.chat.chat_completion_stream_generator(
                request, results, *common, chat_template_kwargs=template_kwargs
            )
            return StreamedAnswer(job, outputs, results, lines)
        whole = self.chat.chat_completion_full_generator(request, results, *common, parser=parser)
        return WholeAnswer(job, outputs, results, _checked(whole))

    def _open_completion(
        self, job: Job, request: CompletionRequest, prompts: list[PromptParams]
    ) -> AnswerStream:
        request_id = f"cmpl-{_public_id(request, job)}"
        outputs = Outputs(self.tokenizer, prompts, job.n)
        metadata = RequestResponseMetadata(request_id=request_id)
        results = Results(indexed=True)
        if job.stream:
            lines = self.completion.completion_stream_generator(
                request,
                [tokens_input(prompt.token_ids) for prompt in prompts],
                results,
                request_id,
                job.created,
                job.model,
                num_prompts=len(prompts),
                tokenizer=self.tokenizer,
                request_metadata=metadata,
            )
            return StreamedAnswer(job, outputs, results, lines)

        async def whole() -> Any:
            by_prompt = dict([result async for result in results])
            return self.completion.request_output_to_completion_response(
                [by_prompt[index] for index in range(len(prompts))],
                request,
                request_id,
                job.created,
                job.model,
                self.tokenizer,
                metadata,
            )

        return WholeAnswer(job, outputs, results, whole())

    def _open_generate(self, job: Job) -> AnswerStream:
        request: GenerateRequest = vllm_request.validated(_generate, job.body)
        prompts = [_prompt_params(job, 0, None)]
        request.sampling_params = prompts[0].sampling_params  # with the defaults that render added
        request_id = f"generate-tokens-{_public_id(request, job)}"
        outputs = Outputs(self.tokenizer, prompts, job.n)
        results = Results(indexed=False)
        metadata = RequestResponseMetadata(request_id=request_id)
        given = (request, results, request_id, job.model, metadata)
        if job.stream:
            lines = self.tokens.serve_tokens_stream_generator(*given)
            return StreamedAnswer(job, outputs, results, lines)
        whole = self.tokens.serve_tokens_full_generator(*given)
        return WholeAnswer(job, outputs, results, _checked(whole))

    def _adjust(self, request: ChatCompletionRequest, prompt_token_ids: list[int]) -> None:
        """Change the request as rendering did, without template and tokenizer.

        Parsers read what rendering wrote into it; vLLM skips the rest when the prompt's IDs come along.
        """
        renderer = with_prompt(self.stack.online_renderer, request, prompt_token_ids)
        echo, request.echo = request.echo, False  # with it, vLLM would not take the IDs
        try:
            result = vllm_request.run_now(renderer.render_chat(request))
        except Exception as error:
            raise vllm_request.request_error(error) from error
        if isinstance(result, ErrorResponse):
            raise vllm_request.response_error(result)
        request.kv_transfer_params = None
        request.echo = echo

    def _templated(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], str | None]:
        """Return the messages and the text that the template made of them, where the answer repeats either."""
        if not (request.echo or request.return_prompt_text):
            return [], None
        frontend = self.stack.frontend
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(
            frontend["chat_template"], frontend["chat_template_content_format"]
        ).with_defaults(
            {**(frontend["default_chat_template_kwargs"] or {}), "tools": tools, "tokenize": False}
        )
        conversation, prompt = self.stack.renderer.render_messages(request.messages, params)
        return conversation, self._tokenized_part(request, prompt["prompt"])

    def _echoed(self, request: CompletionRequest, job: Job) -> list[str | None]:
        """Return the text of each prompt where the answer repeats it, else None for each."""
        if not request.echo:
            return [None] * len(job.prompts)
        given: Any = request.prompt or []
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        return [
            self._tokenized_part(request, prompt)
            if isinstance(prompt, str)
            else self.tokenizer.decode(prompt)
            for prompt in given
        ]

    def _tokenized_part(self, request: VllmRequest, text: str) -> str:
        """Return what is left of a text that truncation cuts before it is tokenized."""
        params = request.build_tok_params(self.stack.model_config)
        kept: str = params.apply_pre_tokenization(self.tokenizer, {"prompt": text})["prompt"]
        return kept


def _public_id(request: VllmRequest | GenerateRequest, job: Job) -> str:
    """Return what the answer's `id` is made of: as in vLLM's server the header's, else the body's, else a new one."""
    is_in_body = "request_id" in request.model_fields_set
    return request.request_id if is_in_body and not job.is_own_id else job.request_id


def _prompt_params(job: Job, index: int, text: str | None) -> PromptParams:
    prompt = job.prompts[index]
    try:
        params = _params_decoder.decode(prompt.sampling_params)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(
            f"sampling_params of prompt {index} are no SamplingParams of this vLLM: {error}"
        ) from None
    return PromptParams(
        token_ids=packed.unpack(prompt.token_ids), sampling_params=params, text=text
    )


async def _checked(whole: Coroutine[Any, Any, Any]) -> Any:
    """Return vLLM's response object. Raises: RequestError for its error object."""
    response = await whole
    if isinstance(response, ErrorResponse):
        raise vllm_request.response_error(response)
    return response
