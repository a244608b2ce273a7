"""Token IDs out as they came in: the answer to a `generate` request, without vLLM."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.derender.renderer import Closed, Fed, Logprobs
from headrace.shared import token_ids as packed
from headrace.shared.errors import BadRequestError, EngineRequestError
from headrace.shared.messages import FinishReason, Job, PromptLogprobs

_encoder = msgspec.json.Encoder()


class FakeGenerateAnswer:
    """An answer in the shape of vLLM's `/inference/v1/generate`."""

    def __init__(self, job: Job, *, asks_usage: bool) -> None:
        self._job = job
        self._asks_usage = asks_usage
        self._token_ids: list[list[int]] = [[] for _ in range(job.n)]
        self._ends: list[dict[str, Any]] = [{} for _ in range(job.n)]

    @property
    def is_finished(self) -> bool:
        return all(self._ends)

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
        if not 0 <= choice < self._job.n:
            raise BadRequestError(f"choice must be 0 to {self._job.n - 1}, got {choice}")
        if self._ends[choice]:
            return Fed()
        if finish_reason == "error":
            raise EngineRequestError("the engine failed this request")
        self._token_ids[choice] += token_ids
        if finish_reason:
            self._ends[choice] = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        if not self._job.stream:
            return Fed()
        # One chunk a token ID: how they were cut must make no difference.
        last = len(token_ids) - 1
        chunks = [
            self._chunk(choice, [token_id], ended=index == last)
            for index, token_id in enumerate(token_ids)
        ]
        if not token_ids and finish_reason:
            chunks.append(self._chunk(choice, [], ended=True))
        return Fed(chunks=tuple(chunks))

    def close(self) -> Closed:
        if self._job.stream:
            last = self._object({"choices": [], "usage": self._usage()})
            return Closed(chunks=(last,) if self._asks_usage else ())
        choices = [
            {"index": index, "token_ids": ids, "logprobs": None, **end}
            for index, (ids, end) in enumerate(zip(self._token_ids, self._ends, strict=True))
        ]
        named = {"model": self._job.model, "created": self._job.created}
        return Closed(body=self._object({**named, "choices": choices, "usage": self._usage()}))

    def _chunk(self, choice: int, token_ids: list[int], *, ended: bool) -> bytes:
        end = self._ends[choice] if ended else {}
        whole = {"finish_reason": None, "stop_reason": None, **end}
        part = {"index": choice, "token_ids": token_ids, "logprobs": None, **whole}
        return self._object({"choices": [part], "usage": None})

    def _usage(self) -> dict[str, int]:
        prompt = packed.count(self._job.prompts[0].token_ids)
        completion = sum(map(len, self._token_ids))
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }

    def _object(self, fields: dict[str, Any]) -> bytes:
        request_id = f"generate-tokens-{self._job.request_id}"
        return _encoder.encode({"request_id": request_id, "output_mode": "tokens", **fields})
