"""Answers of the Responses API without vLLM: one message, in the events that vLLM's server sends."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from headrace.derender.renderer import Closed, Fed, Logprobs
from headrace.shared import token_ids as packed
from headrace.shared.errors import BadRequestError, EngineRequestError
from headrace.shared.messages import FinishReason, Job, PromptLogprobs

_encoder = msgspec.json.Encoder()


class _Body(msgspec.Struct):
    request_id: str | None = None
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None


_decoder = msgspec.json.Decoder(_Body)


class FakeResponse:
    """An answer in the shape of `/v1/responses`. One ID at a time, so that cuts make no difference."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._body = _decoder.decode(job.body)
        self._item_id = f"msg_{job.request_id}"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._finish_reason: FinishReason | None = None
        self._num_token_ids = 0
        self._num_events = 0

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

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
        if choice != 0:
            raise BadRequestError(f"choice must be 0, got {choice}")
        if self._finish_reason:
            return Fed()
        if finish_reason == "error":
            raise EngineRequestError("the engine failed this request")
        events = [] if self._num_events or not self._job.stream else self._opening()
        for index, token_id in enumerate(token_ids):
            self._num_token_ids += 1
            is_stop = finish_reason == "stop" and index == len(token_ids) - 1
            delta = "" if is_stop or token_id > 255 else self._decoder.decode(bytes([token_id]))
            self._text += delta
            if delta and self._job.stream:
                events.append(self._text_event("delta", {"delta": delta, "logprobs": []}))
        self._finish_reason = finish_reason
        return Fed(chunks=tuple(events))

    def close(self) -> Closed:
        whole = self._response("incomplete" if self._finish_reason == "length" else "completed")
        body = _encoder.encode(whole)
        if not self._job.stream:
            return Closed(body=body)
        events = [
            self._text_event("done", {"text": self._text, "logprobs": []}),
            self._event("response.content_part.done", self._place() | {"part": self._part()}),
            self._event(
                "response.output_item.done", {"output_index": 0, "item": self._item("completed")}
            ),
            self._event("response.completed", {"response": whole}),
        ]
        return Closed(chunks=tuple(events), result=body)

    def _opening(self) -> list[bytes]:
        began = {"response": self._response("in_progress")}
        item = self._item("in_progress")
        return [
            self._event("response.created", began),
            self._event("response.in_progress", began),
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", self._place() | {"part": self._part()}),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _text_event(self, change: str, fields: dict[str, Any]) -> bytes:
        return self._event(f"response.output_text.{change}", self._place() | fields)

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        event = {"type": name, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return _encoder.encode(event)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()] if status == "completed" else [],
        }

    def _response(self, status: str) -> dict[str, Any]:
        has_ended = status != "in_progress"
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._body.request_id or f"resp_{self._job.request_id}",
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "incomplete_details": reason,
            "instructions": self._body.instructions,
            "metadata": self._body.metadata,
            "model": self._job.model,
            "output": [self._item("completed")] if has_ended else [],
            "parallel_tool_calls": True,
            "temperature": self._body.temperature or 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._body.max_output_tokens,
            "previous_response_id": None,
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        num_input = sum(packed.count(prompt.token_ids) for prompt in self._job.prompts)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self._num_token_ids,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + self._num_token_ids,
        }
