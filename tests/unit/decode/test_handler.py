"""One job: where its prompt is computed, and what each of its choices asks the engine for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.decode.handler import DecodeHandler, Stopwatch
from headrace.decode.prefix_index import PrefixIndex
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import DecodeOutput
from headrace.shared import token_ids
from headrace.shared.messages import Handoff, Job, Prompt
from headrace.shared.subjects import Lane

PROMPT = list(range(1, 41))
TABLE = expected_prompt_logprobs(PROMPT, 1)


def job(*, n: int = 1, prompt_logprobs: int | None = 1) -> Job:
    prompt = Prompt(
        token_ids=token_ids.pack(PROMPT),
        sampling_params=b"params",
        cache_salt="salt",
        prompt_logprobs=prompt_logprobs,
    )
    return Job(
        request_id="r",
        tenant="default",
        model="m",
        lane=Lane.RT,
        endpoint="completions",
        created=1,
        published=1.0,
        deadline=9.0,
        contract="c",
        body=b"{}",
        stream=False,
        prompts=(prompt,),
        n=n,
        priority=7,
    )


class Engine:
    """Notes what it is asked for, and answers two token IDs; its first output has what was asked."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def generate(
        self, sequence_id: str, ids: list[int], params: bytes, **more: Any
    ) -> AsyncGenerator[DecodeOutput, None]:
        self.calls.append(more)
        table = expected_prompt_logprobs(ids, more["prompt_logprobs"])
        yield DecodeOutput(token_ids=[5], prompt_logprobs=table)
        yield DecodeOutput(token_ids=[6], finish_reason="length")


class Leg:
    """A prefill worker that is there, or is not."""

    def __init__(self, has_worker: bool) -> None:
        self.has_worker = has_worker

    async def compute(self, job: Job, prompt: Prompt) -> Handoff:
        return Handoff(
            task_id="t",
            request_id=job.request_id,
            prefill_instance="prefill-1",
            epoch="e",
            contract="c",
            prompt_hash="h",
            expires=30.0,
            kv_transfer_params={"remote_engine_id": "e"},
            prefill_queue_s=0.0,
            prefill_s=0.0,
            prompt_logprobs=expected_prompt_logprobs(PROMPT, prompt.prompt_logprobs),
        )


class Sink:
    """A stream that keeps what it is given."""

    def __init__(self) -> None:
        self.added: list[tuple[int, DecodeOutput]] = []

    def add(self, choice: int, output: DecodeOutput) -> None:
        self.added.append((choice, output))

    def running(self, choice: int, task: Any) -> None:
        pass

    def is_stopped(self, choice: int) -> bool:
        return False


async def run(job: Job, *, remote: bool, index: PrefixIndex | None = None) -> tuple[Engine, Sink]:
    engine, sink = Engine(), Sink()
    handler = DecodeHandler(
        engine,  # type: ignore[arg-type] - only `generate` is called
        Leg(remote),  # type: ignore[arg-type] - no broker behind it
        index or PrefixIndex(16, 8),
        local_prefill_threshold=16,
        max_attempts=2,
        now=lambda: 2.0,
    )
    watch = Stopwatch(job, instance="decode-1", now=lambda: 2.0)
    await handler.generate(job, sink, watch)  # type: ignore[arg-type]
    return engine, sink


@pytest.mark.parametrize("remote", [True, False])
async def test_the_prompts_logprobs_come_once_and_in_the_first_entry(remote: bool) -> None:
    _, sink = await run(job(n=3), remote=remote)
    assert [output.prompt_logprobs for _, output in sink.added] == [TABLE] + [None] * 5
    assert sink.added[0][0] == 0


@pytest.mark.parametrize("remote", [True, False])
async def test_only_the_choice_that_computes_the_prompt_asks_for_its_logprobs(remote: bool) -> None:
    engine, _ = await run(job(n=3), remote=remote)
    asked = [call["prompt_logprobs"] for call in engine.calls]
    assert asked == ([None] * 3 if remote else [1, None, None])
    pulled = [call["kv_transfer_params"] is not None for call in engine.calls]
    assert pulled == [remote, False, False]


async def test_no_logprobs_are_asked_for_where_the_job_asks_for_none() -> None:
    engine, sink = await run(job(prompt_logprobs=None), remote=False)
    assert [call["prompt_logprobs"] for call in engine.calls] == [None]
    assert [output.prompt_logprobs for _, output in sink.added] == [None, None]


@pytest.mark.parametrize("remote", [True, False])
async def test_priority_and_salt_of_the_job_reach_the_engine(remote: bool) -> None:
    engine, _ = await run(job(n=2), remote=remote)
    assert {(call["priority"], call["cache_salt"]) for call in engine.calls} == {(7, "salt")}
    assert [call["seed_offset"] for call in engine.calls] == [0, 1]


@pytest.mark.parametrize(("prompt_logprobs", "remote"), [(None, False), (0, True)])
async def test_a_cached_prompt_goes_to_prefill_when_its_logprobs_are_asked_for(
    prompt_logprobs: int | None, remote: bool
) -> None:
    index = PrefixIndex(16, 8)
    index.add(token_ids.pack(PROMPT), "salt")
    engine, _ = await run(job(prompt_logprobs=prompt_logprobs), remote=True, index=index)
    assert (engine.calls[0]["kv_transfer_params"] is not None) is remote
