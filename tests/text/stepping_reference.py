"""What `vllm serve` answers when its engine makes one token ID a step: its serving objects alone, no headrace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from headrace.engine.vllm_text import TextStack

from .reference import PlaybackEngine


class SteppingEngine(PlaybackEngine):
    """Answers every request with the same token IDs, one an engine step."""

    def __init__(self, stack: TextStack, token_ids: list[int], finish_reason: str) -> None:
        super().__init__(stack, token_ids)
        self._steps = [(token_id, False) for token_id in token_ids[:-1]] + [(token_ids[-1], True)]
        self._finish_reason = FinishReason[finish_reason.upper()]

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        request = self.input_processor.process_inputs(request_id, prompt, params, ("generate",))
        request.external_req_id = request_id
        processor = OutputProcessor(self.renderer.get_tokenizer(), log_stats=False)
        processor.add_request(request, prompt.get("prompt"))
        for token_id, is_last in self._steps:
            step = EngineCoreOutput(request_id, [token_id])
            if is_last:
                step.finish_reason = self._finish_reason
            for output in processor.process_outputs([step]).request_outputs:
                assert isinstance(output, RequestOutput)
                yield output


class SteppingReference:
    """vLLM's chat server for one model."""

    def __init__(self, stack: TextStack) -> None:
        self._stack = stack

    def whole(
        self, body: dict[str, Any], token_ids: list[int], finish_reason: str
    ) -> dict[str, Any]:
        """Return the body of a whole chat."""
        answer = asyncio.run(self._create(body, token_ids, finish_reason))
        assert isinstance(answer, ChatCompletionResponse), answer
        body = json.loads(answer.model_dump_json())
        return body

    def chunks(
        self, body: dict[str, Any], token_ids: list[int], finish_reason: str
    ) -> list[dict[str, Any]]:
        """Return the chunks of a streamed chat."""

        async def collect() -> list[str]:
            return [line async for line in await self._create(body, token_ids, finish_reason)]

        lines = [line.removeprefix("data: ").strip() for line in asyncio.run(collect())]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    async def _create(self, body: dict[str, Any], token_ids: list[int], finish_reason: str) -> Any:
        engine = SteppingEngine(self._stack, token_ids, finish_reason)
        chat = OpenAIServingChat(
            cast(EngineClient, engine),
            cast(OpenAIServingModels, self._stack.models),
            "assistant",
            online_renderer=self._stack.online_renderer,
            reasoning_parser=self._stack.reasoning_parser,
            **self._stack.frontend,
        )
        return await chat.create_chat_completion(ChatCompletionRequest.model_validate(body))
