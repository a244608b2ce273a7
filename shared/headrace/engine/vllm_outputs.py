"""Token IDs of choices to vLLM's `RequestOutput`s, through the code that `vllm serve` runs behind its engine."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from headrace.shared import prompt_logprobs as packing
from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import FinishReason, PromptLogprobs

Row = list[tuple[int, float, int | None]]
"""One token ID's logprobs: `(token_id, logprob, rank)`, the sampled one first."""

Indexed: TypeAlias = tuple[int, RequestOutput]
"""An output and the index of its prompt."""

LONG_PROMPT = 1_024
"""Token IDs; of a longer prompt the detokenizer is given the end."""
TAIL = 64
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_FINISH_REASONS = {str(reason): reason for reason in VllmFinishReason}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptParams:
    """One prompt and what belongs to it."""

    token_ids: list[int]
    sampling_params: SamplingParams  #: as rendered: stop strings, skip_special_tokens, logprobs, …
    text: str | None  #: None where nobody asks for it


class Outputs:
    """Detokenizer, stop strings and logprobs of every choice of one request.

    IDs go in one at a time, so that what comes out can't depend on how they were cut on the way.
    """

    def __init__(self, tokenizer: Any, prompts: Sequence[PromptParams], n: int) -> None:
        self._processor = OutputProcessor(tokenizer, log_stats=False)
        self._choices: list[str] = []
        self._num_logprobs = prompts[0].sampling_params.num_logprobs
        self._n = n
        self._prompts = prompts
        self._prompt_logprobs: dict[int, LogprobsTensors] = {}
        self._started: set[int] = set()
        for index, prompt in enumerate(prompts):
            self._add_prompt(str(index), prompt)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._processor.has_unfinished_requests()

    @property
    def num_choices(self) -> int:
        """How many choices there are, of all prompts."""
        return len(self._choices)

    def add(
        self,
        choice: int,
        token_ids: list[int],
        *,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: list[Row] | None,
        num_cached_token_ids: int,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> tuple[list[Indexed], bool]:
        """Return what came out, each with its prompt's index, and whether a stop string was found.

        `prompt_logprobs` come with the prompt's first choice, and are those of its others too.
        Raises: EngineRequestError when logprobs were asked for and don't fit the IDs.
        """
        rows = self._rows(token_ids, logprobs)
        of_prompt = self._of_prompt(choice, prompt_logprobs) if token_ids else None
        cached = PrefillStats(num_cached_tokens=num_cached_token_ids)
        results: list[Indexed] = []
        last = max(0, len(token_ids) - 1)  # an end without an ID, as of an abort, is one step too
        for index in range(last + 1):
            step = EngineCoreOutput(
                request_id=self._choices[choice],
                new_token_ids=token_ids[index : index + 1],
                new_logprobs=rows[index] if rows else None,
                new_prompt_logprobs_tensors=of_prompt if index == 0 else None,
                prefill_stats=cached,
            )
            if index == last and finish_reason is not None:
                step.finish_reason = _FINISH_REASONS[finish_reason]
                step.stop_reason = stop_reason
            if not step.new_token_ids and step.finish_reason is None:
                break
            done = self._processor.process_outputs([step])
            for output in done.request_outputs:
                assert isinstance(output, RequestOutput)
                output.num_cache_creation_tokens = None  # nobody tells it here; 0 would be a claim
                results.append((choice // self._n, output))
            if done.reqs_to_abort:
                return results, True
        return results, False

    def has_ended(self, choice: int) -> bool:
        """Whether this choice has its finish reason."""
        return self._choices[choice] not in self._processor.request_states

    def _add_prompt(self, request_id: str, prompt: PromptParams) -> None:
        request = EngineCoreRequest(
            request_id=request_id,
            external_req_id=request_id,
            prompt_token_ids=prompt.token_ids,
            mm_features=None,
            sampling_params=prompt.sampling_params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        parent = ParentRequest(request) if self._n > 1 else None
        for index in range(self._n):
            child = copy(request)
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
            self._processor.add_request(child, prompt.text, parent, index)
            self._choices.append(child.request_id)
            _prime_with_the_tail(
                self._processor.request_states[child.request_id].detokenizer, prompt.token_ids
            )

    def _of_prompt(self, choice: int, given: PromptLogprobs | None) -> LogprobsTensors | None:
        """Return the logprobs of a choice's prompt, where they were asked for and it has not had them."""
        index = choice // self._n
        prompt = self._prompts[index]
        if prompt.sampling_params.prompt_logprobs is None or choice in self._started:
            return None
        self._started.add(choice)
        if index not in self._prompt_logprobs:
            problem = packing.problem(given, prompt.token_ids)
            if given is None or problem is not None:
                raise EngineRequestError(str(problem))
            self._prompt_logprobs[index] = _tensors(given, len(prompt.token_ids) - 1)
        return self._prompt_logprobs[index]

    def _rows(self, token_ids: list[int], logprobs: list[Row] | None) -> list[LogprobsLists] | None:
        if self._num_logprobs is None:
            return None
        if len(logprobs or ()) != len(token_ids):
            raise EngineRequestError(
                f"logprobs were asked for: expected one entry for each of {len(token_ids)} token IDs, "
                f"got {len(logprobs or ())}"
            )
        return [
            _row(row, token_id) for row, token_id in zip(logprobs or (), token_ids, strict=True)
        ]


def _row(row: Row, token_id: int) -> LogprobsLists:
    if not row or row[0][0] != token_id:
        raise EngineRequestError(
            f"the logprobs of token ID {token_id} must start with its own, got {row[:1]}"
        )
    return LogprobsLists(
        logprob_token_ids=np.array([[entry[0] for entry in row]]),
        logprobs=np.array([[entry[1] for entry in row]], dtype=np.float64),
        sampled_token_ranks=np.array([row[0][2] or 0]),
    )


def _prime_with_the_tail(detokenizer: Any, token_ids: list[int]) -> None:
    """Let a detokenizer know the end of a long prompt, and not all of it.

    It decodes what it knows with its first step, and holds the interpreter for it: 40 ms for 100,000 IDs. What
    comes out depends on the end alone where that begins and ends with whole characters; else it stays as it is.
    """
    if len(token_ids) <= LONG_PROMPT or not isinstance(detokenizer, FastIncrementalDetokenizer):
        return
    for length in range(TAIL, LONG_PROMPT, TAIL):
        tail = token_ids[-length:]
        text = detokenizer.tokenizer.decode(tail, skip_special_tokens=False)
        if text.endswith(REPLACEMENT):
            return
        if not text.startswith(REPLACEMENT):
            detokenizer.stream = DecodeStream(
                ids=tail, skip_special_tokens=detokenizer.skip_special_tokens
            )
            return


def _tensors(table: PromptLogprobs, num_rows: int) -> LogprobsTensors:
    shape = (num_rows, table.width)
    token_ids = np.frombuffer(table.token_ids, dtype="<u4").astype(np.int64)
    logprobs = np.frombuffer(table.logprobs, dtype="<f4").astype(np.float32)
    ranks = np.frombuffer(table.ranks, dtype="<u4").astype(np.int64)
    return LogprobsTensors(
        logprob_token_ids=torch.from_numpy(token_ids.reshape(shape)),
        logprobs=torch.from_numpy(logprobs.reshape(shape)),
        selected_token_ranks=torch.from_numpy(ranks),
    )
