"""Answers of the Responses API: vLLM's own serving object, with token IDs from the wire in place of its engine."""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from headrace.derender.answer import Results, StreamedAnswer, WholeAnswer
from headrace.derender.renderer import AnswerStream, Closed
from headrace.engine import vllm_request, vllm_responses
from headrace.engine.vllm_outputs import Outputs
from headrace.engine.vllm_text import TextStack
from headrace.engine.vllm_versions import ErrorResponse
from headrace.engine.vllm_versions_text import with_prompt
from headrace.shared.errors import RequestError
from headrace.shared.messages import Job

_RANDOM_PART = re.compile(r"[0-9a-f]{16,32}\Z")
_ID_FIELDS = ("id", "item_id", "call_id")


class ResponsesServer:
    """Opens answers of the Responses API."""

    def __init__(self, stack: TextStack) -> None:
        self._serving = vllm_responses.serving(stack)

    def open(self, job: Job, outputs: Outputs, prompt_token_ids: list[int]) -> AnswerStream:
        """Return a new answer. Raises: RequestError when the job's body can't be read."""
        request = vllm_responses.parse(job.body)
        if "request_id" not in request.model_fields_set:
            request.request_id = f"resp_{job.request_id}"
        results = Results(indexed=False)
        serving = _fed_with(self._serving, results, job.created)
        serving.online_renderer = with_prompt(serving.online_renderer, request, prompt_token_ids)
        answer = serving.create_responses(request)
        if not job.stream:
            return _WholeResponse(job, outputs, results, _checked(answer))
        return _StreamedResponse(job, outputs, results, _checked_now(answer))


def _fed_with(
    serving: OpenAIServingResponses, results: Results, created: int
) -> OpenAIServingResponses:
    """Return a serving object for one answer; the model's parts of it are shared."""
    mine = copy.copy(serving)

    async def outputs(*, context: Any, **_: Any) -> AsyncIterator[Any]:
        async for output in results:
            context.append_output(output)
            yield context

    async def whole(*args: Any, created_time: int = created) -> Any:
        return await serving.responses_full_generator(*args, created_time=created_time)

    def streamed(*args: Any) -> Any:
        return serving.responses_stream_generator(*args, created_time=created)

    mine._generate_with_builtin_tools = outputs
    mine.responses_full_generator = whole
    mine.responses_stream_generator = streamed
    return mine


async def _checked(answer: Coroutine[Any, Any, Any]) -> Any:
    response = await answer
    if isinstance(response, ErrorResponse):
        raise vllm_request.response_error(response)
    return response


def _checked_now(answer: Coroutine[Any, Any, Any]) -> Any:
    """Return vLLM's generator of events, which waits for nothing but token IDs. Raises: RequestError."""
    try:
        return vllm_request.run_now(_checked(answer))
    except RequestError:
        raise
    except Exception as error:
        raise vllm_request.request_error(error) from error


class _StreamedResponse(StreamedAnswer):
    """Events as they come; each has its `type`."""

    async def _read(self, lines: AsyncGenerator[Any, None]) -> None:
        item_ids = ItemIds(self._job.request_id)
        self._result = b""
        async for event in lines:
            item_ids.fix_event(event)
            if event.type == "response.completed":
                self._result = event.response.model_dump_json(by_alias=True).encode()
            self._chunks.append(event.model_dump_json(by_alias=True).encode())

    def close(self) -> Closed:
        return replace(super().close(), result=self._result)


class _WholeResponse(WholeAnswer):
    """One response object."""

    def close(self) -> Closed:
        self._results.end()
        response = self._go_on()
        ItemIds(self._job.request_id).fix_response(response)
        return Closed(body=response.model_dump_json(by_alias=True).encode())


class ItemIds:
    """Puts IDs made of request and position in place of random ones, so that a replay gives the same answer.

    IDs with a meaning (`functions.get_weather:0`) stay.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._known: dict[str, str] = {}
        self._made: set[str] = set()

    def fix_event(self, event: Any) -> None:
        """Fix the IDs of an event: its own, its item's, those of a response in it."""
        self._fix(event)
        if (item := getattr(event, "item", None)) is not None:
            self._fix(item)
        if (response := getattr(event, "response", None)) is not None:
            self.fix_response(response)

    def fix_response(self, response: Any) -> None:
        """Fix the IDs of the output items of a response; its own was never random."""
        for item in response.output:
            self._fix(item)

    def _fix(self, item: Any) -> None:
        for name in _ID_FIELDS:
            value = getattr(item, name, None)
            if isinstance(value, str):
                setattr(item, name, self._fixed(value))

    def _fixed(self, value: str) -> str:
        if value in self._made:  # vLLM uses an item again in the last event
            return value
        if value not in self._known:
            seed = f"{self._request_id}/{len(self._known)}".encode()
            digits = blake2b(seed, digest_size=16).hexdigest()
            self._known[value] = _RANDOM_PART.sub(lambda match: digits[: len(match.group())], value)
            self._made.add(self._known[value])
        return self._known[value]
