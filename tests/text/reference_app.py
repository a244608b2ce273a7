"""Every endpoint of `vllm serve` for text and token IDs: vLLM's own routers, and an engine that plays back IDs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.derender.api_router import router as derender_router
from vllm.entrypoints.scale_out.derender.serving import ServingDerender
from vllm.entrypoints.scale_out.render.api_router import router as render_router
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router as generate_router
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.outputs import RequestOutput
from vllm.renderers.online_derenderer import OnlineDerenderer
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import accepted

from . import error_handlers
from .reference import PlaybackEngine


class SteppingEngine(PlaybackEngine):
    """Plays the IDs back one an engine step."""

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        request = self.input_processor.process_inputs(request_id, prompt, params, ("generate",))
        request.external_req_id = request_id
        processor = OutputProcessor(self.renderer.get_tokenizer(), log_stats=False)
        processor.add_request(request, prompt.get("prompt"))
        for index, token_id in enumerate(self._token_ids):
            is_last = index == len(self._token_ids) - 1
            step = EngineCoreOutput(
                request_id, [token_id], finish_reason=FinishReason.STOP if is_last else None
            )
            for output in processor.process_outputs([step]).request_outputs:
                assert isinstance(output, RequestOutput)
                yield output


def app(stack: TextStack, token_ids: list[int] = []) -> FastAPI:  # noqa: B006
    """Return vLLM's app; its engine answers everything with these IDs."""
    engine = cast(EngineClient, SteppingEngine(stack, token_ids))
    models = cast(OpenAIServingModels, stack.models)
    frontend = dict(stack.frontend)
    template = {
        name: frontend[name]
        for name in (
            "chat_template",
            "chat_template_content_format",
            "default_chat_template_kwargs",
        )
    }
    del frontend["request_logger"]
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.serving_tokenization = ServingTokenization(models, stack.online_renderer, **template)
    app.state.serving_render = ServingRender(models, stack.online_renderer)
    derenderer = OnlineDerenderer(
        model_config=stack.model_config,
        renderer=stack.renderer,
        request_logger=None,
        reasoning_parser=stack.reasoning_parser or None,
        **frontend,
    )
    app.state.serving_derender = ServingDerender(models, derenderer)
    sides = {"online_renderer": stack.online_renderer, "online_derenderer": derenderer}
    app.state.serving_tokens = ServingTokens(
        engine, models, request_logger=None, **accepted(ServingTokens, sides)
    )
    app.state.openai_serving_responses = OpenAIServingResponses(
        engine,
        models,
        stack.online_renderer,
        request_logger=None,
        reasoning_parser=stack.reasoning_parser,
        **frontend,
    )
    error_handlers.add(app)
    for router in (
        tokenize_router,
        render_router,
        derender_router,
        generate_router,
        responses_router,
    ):
        app.include_router(router)
    return app
