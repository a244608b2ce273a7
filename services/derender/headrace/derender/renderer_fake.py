"""A derenderer without vLLM: token IDs are the answer's UTF-8 bytes. For load and fault tests."""

from __future__ import annotations

import codecs
from typing import Any, Literal

import msgspec

from headrace.derender.generate_fake import FakeGenerateAnswer
from headrace.derender.renderer import AnswerStream, Closed, Fed, Logprobs
from headrace.derender.responses_fake import FakeResponse
from headrace.shared import prompt_logprobs as packing
from headrace.shared import token_ids as packed
from headrace.shared.contract import contract
from headrace.shared.errors import BadRequestError, EngineRequestError
from headrace.shared.messages import Ask, FinishReason, Job, PromptLogprobs
from headrace.shared.settings import Settings

_encoder = msgspec.json.Encoder()


class _Params(msgspec.Struct):
    """The part of `SamplingParams` that shapes the text."""

    stop: list[str] = []
    include_stop_str_in_output: bool = False
    logprobs: int | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    stream_options: _StreamOptions | None = None


_params_decoder = msgspec.msgpack.Decoder(_Params)
_body_decoder = msgspec.json.Decoder(_Body)


class FakeDerenderer:
    """A `Derenderer` that needs no model."""

    def __init__(self, settings: Settings) -> None:
        self.contract = contract(settings, engine="fake")

    async def start(self) -> None:
        pass

    def open(self, job: Job) -> AnswerStream:
        try:
            params = _params_decoder.decode(job.prompts[0].sampling_params)
            body = _body_decoder.decode(job.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequestError(f"job {job.request_id} can't be read: {error}") from None
        if job.endpoint == "generate":
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return FakeGenerateAnswer(job, asks_usage=usage)
        if job.endpoint == "responses":
            return FakeResponse(job)
        return _FakeAnswer(job, params, body)

    async def ask(self, ask: Ask) -> bytes:
        raise BadRequestError(f"{ask.endpoint} is not supported by the fake engine")

    async def close(self) -> None:
        pass


class _Choice:
    """One choice: bytes to text, with stop strings; one ID at a time, so that cuts make no difference."""

    def __init__(self, params: _Params) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._params = params
        self._held = max((len(stop) for stop in params.stop), default=1) - 1
        self._sent = 0
        self.text = ""
        self.num_token_ids = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[tuple[int, float, int | None]] = []

    def add(self, token_id: int, *, is_stop: bool) -> bool:
        """Add one ID; return whether it completed a stop string. A stop token is no text."""
        self.num_token_ids += 1
        if is_stop or token_id > 255:
            return False
        self.text += self._decoder.decode(bytes([token_id]))
        found = [stop for stop in self._params.stop if stop in self.text]
        if not found:
            return False
        self.finish_reason, self.stop_reason = "stop", found[0]
        end = self.text.index(found[0])
        self.text = self.text[: end + len(found[0]) * self._params.include_stop_str_in_output]
        return True

    def end(self, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        self.text += self._decoder.decode(b"", final=True)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def delta(self) -> str:
        """Return the text that was not returned yet and can't become part of a stop string."""
        until = len(self.text) - (0 if self.finish_reason else self._held)
        text = self.text[self._sent : max(until, self._sent)]
        self._sent += len(text)
        return text


class _FakeAnswer:
    """An answer in OpenAI's shape."""

    def __init__(self, job: Job, params: _Params, body: _Body) -> None:
        self._job = job
        self._is_chat = job.endpoint == "chat.completions"
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._asks_logprobs = params.logprobs is not None
        self._choices = [_Choice(params) for _ in range(job.n * len(job.prompts))]
        self._num_cached = 0
        self._started = False
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

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
        if not 0 <= choice < len(self._choices):
            raise BadRequestError(f"choice must be 0 to {len(self._choices) - 1}, got {choice}")
        state = self._choices[choice]
        if state.finish_reason:
            return Fed()
        if finish_reason == "error":
            raise EngineRequestError("the engine failed this request")
        if self._asks_logprobs and len(logprobs or ()) != len(token_ids):
            raise EngineRequestError(
                f"expected logprobs for each of {len(token_ids)} token IDs, got {len(logprobs or ())}"
            )
        self._num_cached = max(self._num_cached, num_cached_token_ids)
        self._take_prompt_logprobs(choice // self._job.n, prompt_logprobs)
        chunks = [] if self._started or not self._job.stream else self._roles()
        self._started = True
        stopped = False
        for index, token_id in enumerate(token_ids):
            if self._asks_logprobs and logprobs:
                state.logprobs.append(logprobs[index][0])
            is_last = index == len(token_ids) - 1
            stopped = state.add(token_id, is_stop=is_last and finish_reason == "stop")
            if is_last and finish_reason and not stopped:
                state.end(finish_reason, stop_reason)
            if self._job.stream:
                chunks += self._chunk(choice)
            if stopped:
                break
        if not token_ids and finish_reason:
            state.end(finish_reason, stop_reason)
            chunks += self._chunk(choice) if self._job.stream else []
        return Fed(chunks=tuple(chunks), stopped=stopped)

    def close(self) -> Closed:
        if self._job.stream:
            last = {"choices": [], "usage": self._usage_object()}
            return Closed(chunks=(self._object(last),) if self._usage else ())
        choices = [self._whole(index) for index in range(len(self._choices))]
        return Closed(body=self._object({"choices": choices, "usage": self._usage_object()}))

    def _roles(self) -> list[bytes]:
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._object({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
            for index in range(len(self._choices))
        ]

    def _chunk(self, index: int) -> list[bytes]:
        state = self._choices[index]
        text = state.delta()
        if not text and not state.finish_reason:
            return []
        part: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return [self._object({"choices": [{"index": index, **part, **self._ending(state)}]})]

    def _whole(self, index: int) -> dict[str, Any]:
        state = self._choices[index]
        message = {"role": "assistant", "content": state.text}
        part: dict[str, Any] = {"message": message} if self._is_chat else {"text": state.text}
        rows = self._prompt_rows(index)
        asked = {} if rows is None else {"prompt_logprobs": rows}
        return {"index": index, **part, **asked, **self._ending(state)}

    def _take_prompt_logprobs(self, prompt: int, table: PromptLogprobs | None) -> None:
        if self._job.prompts[prompt].prompt_logprobs is None or prompt in self._prompt_logprobs:
            return
        problem = packing.problem(table, packed.unpack(self._job.prompts[prompt].token_ids))
        if table is None or problem is not None:
            raise EngineRequestError(str(problem))
        self._prompt_logprobs[prompt] = table

    def _prompt_rows(self, index: int) -> list[Any] | None:
        """Return what vLLM's answers have: an object a token ID, and nothing for the first one."""
        table = self._prompt_logprobs.get(index // self._job.n)
        if table is None:
            return None
        ids, logprobs = packed.unpack(table.token_ids), packing.unpack_logprobs(table)
        starts = range(0, len(ids), table.width or 1)
        return [
            None,
            *(
                {
                    str(ids[i]): {"logprob": logprobs[i]}
                    for i in reversed(range(start, start + table.width))
                }
                for start in starts
            ),
        ]

    def _ending(self, state: _Choice) -> dict[str, Any]:
        return {
            "logprobs": self._logprobs(state),
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }

    def _logprobs(self, state: _Choice) -> dict[str, Any] | None:
        """Return the logprobs that were not returned yet."""
        if not self._asks_logprobs:
            return None
        rows, state.logprobs = state.logprobs, []
        tokens = [chr(token_id) if token_id < 256 else "" for token_id, _, _ in rows]
        if self._is_chat:
            pairs = zip(tokens, rows, strict=True)
            return {"content": [{"token": token, "logprob": row[1]} for token, row in pairs]}
        return {"tokens": tokens, "token_logprobs": [row[1] for row in rows]}

    def _usage_object(self) -> dict[str, Any]:
        prompt = sum(packed.count(prompt.token_ids) for prompt in self._job.prompts)
        completion = sum(choice.num_token_ids for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def _object(self, fields: dict[str, Any]) -> bytes:
        kind: Literal["chatcmpl", "cmpl"] = "chatcmpl" if self._is_chat else "cmpl"
        name = "text_completion"
        if self._is_chat:
            name = "chat.completion.chunk" if self._job.stream else "chat.completion"
        return _encoder.encode(
            {
                "id": f"{kind}-{self._job.request_id}",
                "object": name,
                "created": self._job.created,
                "model": self._job.model,
                **fields,
            }
        )
