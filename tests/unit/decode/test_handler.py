"""One job: where its prompt is computed, and what each of its choices asks the engine for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from headrace.decode.handler import DecodeHandler, Stopwatch
from headrace.decode.pending import AttemptFailedError
from headrace.decode.prefix_index import PrefixIndex
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import DecodeOutput
from headrace.shared import token_ids
from headrace.shared.errors import (
    BadRequestError,
    CancelledRequestError,
    EngineRequestError,
    HandoffError,
    NoWorkerError,
    RequestError,
)
from headrace.shared.messages import Handoff, Job, Prompt, Timings
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
    """Prefill workers that are there, or are not; each is asked once, and the first ones fail as told."""

    def __init__(self, has_worker: bool, *errors: Exception | None) -> None:
        self._has_worker = has_worker
        self._errors = list(errors)
        self.excluded: list[set[str]] = []
        self.told: list[str] = []

    def has_worker(self, failed: set[str]) -> bool:
        return self._has_worker

    def pulled(self, handoff: Handoff) -> None:
        self.told.append("pulled")

    def not_pulled(self, handoff: Handoff) -> None:
        self.told.append("not pulled")

    def release(self, handoff: Handoff) -> None:
        self.told.append("released")

    async def compute(self, job: Job, prompt: Prompt, failed: set[str]) -> Handoff:
        self.excluded.append(set(failed))
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            failed.add(f"prefill-{len(self.excluded)}")
            raise error
        return Handoff(
            task_id="t",
            request_id=job.request_id,
            prefill_instance=f"prefill-{len(self.excluded)}",
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


async def run(
    job: Job,
    *,
    remote: bool = True,
    index: PrefixIndex | None = None,
    leg: Leg | None = None,
    engine: Engine | None = None,
    max_attempts: int = 2,
    is_colocated: bool = False,
) -> tuple[Engine, Sink]:
    engine, sink = engine or Engine(), Sink()
    handler = DecodeHandler(
        engine,  # type: ignore[arg-type] - only `generate` is called
        leg or Leg(remote),  # type: ignore[arg-type] - no broker behind it
        index or PrefixIndex(16, 8),
        local_prefill_threshold=16,
        is_colocated=is_colocated,
        max_attempts=max_attempts,
        now=lambda: 2.0,
    )
    watch = Stopwatch(job, instance="decode-1", now=lambda: 2.0)
    await handler.generate(job, sink, watch)  # type: ignore[arg-type]
    return engine, sink


def test_a_stopwatchs_times_follow_one_another_from_the_jobs_publication_to_the_last_token_id() -> (
    None
):
    clock = iter([10.5, 11.5, 14.0, 20.0])  # taken, ready, first, last
    watch = Stopwatch(
        msgspec.structs.replace(job(), published=10.0, timings=Timings(accepted=9.0)),
        instance="decode-1",
        now=lambda: next(clock),
    )
    watch.prefilled_here()
    watch.token()
    watch.token()
    timings = watch.read(2)
    assert (timings.decode_queue_s, timings.prefill_wait_s, timings.first_step_s) == (0.5, 1.0, 2.5)
    assert (timings.first_token_s, timings.decode_s) == (5.0, 6.0)


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


async def test_a_colocated_engine_asks_nobody_and_that_is_no_fallback() -> None:
    def count(reason: str) -> float:
        labels = {"reason": reason}
        return REGISTRY.get_sample_value("headrace_local_prefills_total", labels) or 0.0

    before = count("no_worker"), count("colocated")
    leg = Leg(True)
    engine, _ = await run(job(prompt_logprobs=None), leg=leg, is_colocated=True)
    assert where(engine) == ["here"]
    assert leg.excluded == []
    assert (count("no_worker"), count("colocated")) == (before[0], before[1] + 1)


class FailingEngine(Engine):
    """Fails its first calls: with an error, or with a pull that fails; some after a first token ID."""

    def __init__(self, *failures: Exception | str | None, emit_first: bool = False) -> None:
        super().__init__()
        self._failures = list(failures)
        self._emit_first = emit_first

    async def generate(
        self, sequence_id: str, ids: list[int], params: bytes, **more: Any
    ) -> AsyncGenerator[DecodeOutput, None]:
        failure = self._failures.pop(0) if self._failures else None
        if failure is None:
            async for output in super().generate(sequence_id, ids, params, **more):
                yield output
            return
        self.calls.append(more)
        if self._emit_first:
            yield DecodeOutput(token_ids=[5])
        if isinstance(failure, Exception):
            raise failure
        yield DecodeOutput(token_ids=[], finish_reason="error")


def where(engine: Engine) -> list[str]:
    """Return where the prompt of each call was computed."""
    return ["here" if call["kv_transfer_params"] is None else "elsewhere" for call in engine.calls]


LOST = AttemptFailedError("prefill worker is gone")
BROKEN = EngineRequestError("the engine failed")


@pytest.mark.parametrize(
    ("errors", "excluded", "computed"),
    [
        ((LOST,), [set(), {"prefill-1"}], "elsewhere"),
        ((HandoffError("expired", "too late"),), [set(), {"prefill-1"}], "elsewhere"),
        ((LOST, LOST), [set(), {"prefill-1"}], "here"),
        ((NoWorkerError("none is left"),), [set()], "here"),
    ],
    ids=["lost", "refused", "budget", "nobody"],
)
async def test_an_attempt_that_failed_goes_elsewhere_and_the_last_one_is_computed_here(
    errors: tuple[Exception, ...], excluded: list[set[str]], computed: str
) -> None:
    leg = Leg(True, *errors)
    engine, sink = await run(job(prompt_logprobs=None), leg=leg, max_attempts=3)
    assert leg.excluded == excluded
    assert where(engine) == [computed]
    assert len(sink.added) == 2


@pytest.mark.parametrize("error", [CancelledRequestError("x"), BadRequestError("x")])
async def test_what_no_other_worker_would_mend_is_not_tried_again(error: RequestError) -> None:
    leg = Leg(True, error)
    with pytest.raises(type(error)):
        await run(job(prompt_logprobs=None), leg=leg, max_attempts=3)
    assert len(leg.excluded) == 1


async def test_a_pull_that_fails_is_given_back_and_tried_elsewhere() -> None:
    leg = Leg(True)
    engine, sink = await run(
        job(prompt_logprobs=None), leg=leg, engine=FailingEngine("pull"), max_attempts=3
    )
    assert leg.excluded == [set(), {"prefill-1"}]
    assert leg.told == ["released", "not pulled", "pulled"]
    assert where(engine) == ["elsewhere", "elsewhere"]
    assert [output.token_ids for _, output in sink.added] == [[5], [6]]


async def test_a_prompt_that_fails_here_is_tried_once_more() -> None:
    engine, sink = await run(
        job(prompt_logprobs=None), leg=Leg(False), engine=FailingEngine(BROKEN), max_attempts=3
    )
    assert where(engine) == ["here", "here"]
    assert [output.token_ids for _, output in sink.added] == [[5], [6]]
    engine = FailingEngine(BROKEN, BROKEN)
    with pytest.raises(EngineRequestError, match="the engine failed"):
        await run(job(prompt_logprobs=None), leg=Leg(False), engine=engine, max_attempts=9)
    assert len(engine.calls) == 2


@pytest.mark.parametrize("failure", [BROKEN, "error"])
async def test_nothing_is_tried_again_once_a_token_id_was_emitted(failure: Exception | str) -> None:
    engine = FailingEngine(failure, emit_first=True)
    with pytest.raises(EngineRequestError):
        await run(job(prompt_logprobs=None), engine=engine, max_attempts=3)
    assert len(engine.calls) == 1


async def test_a_choice_that_fails_after_another_one_began_is_not_tried_again() -> None:
    engine = FailingEngine(None, BROKEN)
    with pytest.raises(EngineRequestError):
        await run(job(n=2, prompt_logprobs=None), leg=Leg(False), engine=engine, max_attempts=3)
    assert len(engine.calls) == 2


@pytest.mark.parametrize("failure", [BROKEN, BadRequestError("too long")])
async def test_a_handoff_that_the_engine_never_pulled_is_given_back(failure: Exception) -> None:
    leg = Leg(True)
    with pytest.raises(type(failure)):
        await run(
            job(prompt_logprobs=None), leg=leg, engine=FailingEngine(*[failure] * 2), max_attempts=3
        )
    assert leg.told[0] == "released"
