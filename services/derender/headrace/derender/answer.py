"""Answers in the making: token IDs in, what vLLM's generators make of them out, all within one call."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any

import msgspec

from headrace.derender import answer_json
from headrace.derender.renderer import Closed, Fed, Logprobs
from headrace.engine.vllm_outputs import Indexed, Outputs
from headrace.shared.errors import BadRequestError, EngineRequestError, RequestError
from headrace.shared.messages import FinishReason, Job, PromptLogprobs

logger = logging.getLogger(__name__)


class Results:
    """What vLLM's generators read their `RequestOutput`s from.

    A generator that has read all there is gets suspended right here, and `_Answer` goes on with it at the next
    feed: no task and no queue, so that a feed returns everything that it led to.
    """

    def __init__(self, *, indexed: bool) -> None:
        self._indexed = indexed  #: completions want the prompt's index beside each output
        self._waiting: deque[Indexed] = deque()
        self._ended = False

    def put(self, results: list[Indexed]) -> None:
        self._waiting.extend(results)

    def end(self) -> None:
        self._ended = True

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> Any:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            await _Suspend()
        index, output = self._waiting.popleft()
        return (index, output) if self._indexed else output


class _Suspend:
    """Awaiting it suspends the coroutine until somebody sends to it."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class _Answer:
    """The part that streamed and whole answers share: IDs in, outputs to the generator."""

    def __init__(
        self, job: Job, outputs: Outputs, results: Results, work: Coroutine[Any, Any, Any]
    ) -> None:
        self._job = job
        self._outputs = outputs
        self._results = results
        self._work = work

    @property
    def is_finished(self) -> bool:
        return self._outputs.is_finished

    def _add(
        self,
        choice: int,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: Logprobs | None,
        num_cached_token_ids: int,
        prompt_logprobs: PromptLogprobs | None,
    ) -> bool:
        """Give the generator what these IDs make; return whether a stop string was found."""
        if not 0 <= choice < self._outputs.num_choices:
            raise BadRequestError(
                f"choice must be 0 to {self._outputs.num_choices - 1}, got {choice}"
            )
        if self._outputs.has_ended(choice):
            return False
        if finish_reason == "error":
            raise EngineRequestError("the engine failed this request")
        results, stopped = self._outputs.add(
            choice,
            token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            num_cached_token_ids=num_cached_token_ids,
            prompt_logprobs=prompt_logprobs,
        )
        self._results.put(results)
        return stopped

    def _start(self) -> None:
        """Run the generator up to where it first wants an output."""
        # The event loop would take charge of the generator, and fail to close one that is suspended here.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=None)
        try:
            self._go_on()
        finally:
            sys.set_asyncgen_hooks(*hooks)

    def _go_on(self) -> Any:
        """Run the generator until it has read everything; return its result once it has ended."""
        try:
            self._work.send(None)
        except StopIteration as stop:
            return stop.value
        except RequestError:
            raise
        except Exception as error:
            logger.exception(
                "derender failed",
                extra={"action": "derender_failed", "request_id": self._job.request_id},
            )
            raise RequestError(f"the answer can't be made from its token IDs: {error}") from error
        return None


class StreamedAnswer(_Answer):
    """An answer in chunks."""

    def __init__(
        self,
        job: Job,
        outputs: Outputs,
        results: Results,
        lines: AsyncGenerator[str, None],
    ) -> None:
        super().__init__(job, outputs, results, self._read(lines))
        self._chunks: list[bytes] = []
        self._tool_calls = answer_json.ToolCallIds(job.request_id)
        self._start()

    def feed(
        self,
        choice: int,
        token_ids: list[int],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Logprobs | None = None,
        num_cached_token_ids: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Fed:
        stopped = self._add(
            choice,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs,
            num_cached_token_ids,
            prompt_logprobs,
        )
        self._go_on()
        return Fed(chunks=self._taken(), stopped=stopped)

    def close(self) -> Closed:
        self._results.end()
        self._go_on()
        return Closed(chunks=self._taken())

    def _taken(self) -> tuple[bytes, ...]:
        chunks, self._chunks = tuple(self._chunks), []
        return chunks

    async def _read(self, lines: AsyncGenerator[str, None]) -> None:
        async for line in lines:
            data = line.removeprefix("data: ").rstrip("\n")
            if data == "[DONE]":
                continue
            if data.startswith('{"error"'):
                raise RequestError(msgspec.json.decode(data)["error"]["message"])
            chunk = answer_json.with_created(data, self._job.created)
            self._chunks.append(self._tool_calls.in_chunk(chunk))


class WholeAnswer(_Answer):
    """An answer in one piece."""

    def __init__(
        self, job: Job, outputs: Outputs, results: Results, work: Coroutine[Any, Any, Any]
    ) -> None:
        super().__init__(job, outputs, results, work)
        self._start()

    def feed(
        self,
        choice: int,
        token_ids: list[int],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: Logprobs | None = None,
        num_cached_token_ids: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Fed:
        stopped = self._add(
            choice,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs,
            num_cached_token_ids,
            prompt_logprobs,
        )
        return Fed(stopped=stopped)

    def close(self) -> Closed:
        self._results.end()
        response = self._go_on()
        response.created = self._job.created
        body = response.model_dump_json().encode()
        return Closed(body=answer_json.ToolCallIds(self._job.request_id).in_body(body))
