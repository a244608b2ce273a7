"""Which job is given back: of a batch, with the least progress, and never one whose reader would notice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest_asyncio

from headrace.decode.continuation import Continuation
from headrace.decode.owned import Owned
from headrace.decode.preemption import CONTINUABLE_S, Preemption
from headrace.decode.stream import Stream
from headrace.decode.takeover import Start
from headrace.engine.interface import DecodeOutput
from headrace.shared.messages import Job, Prompt, Tokens
from headrace.shared.subjects import Lane

JOB = Job(
    request_id="r",
    tenant="acme",
    model="m",
    lane=Lane.BULK,
    endpoint="completions",
    created=0,
    published=0.0,
    deadline=0.0,
    contract="",
    body=b"{}",
    stream=False,
    prompts=(Prompt(token_ids=b"\x01\x00\x00\x00", sampling_params=b"\x80"),),
)


async def _never(*_: object) -> Any:
    raise AssertionError("nobody is claimed here")


class Bench:
    """Running jobs, on a clock of the test's own."""

    def __init__(self) -> None:
        self.time = 0.0
        self.num_told = 0
        self.jobs: dict[str, Owned] = {}
        self.preemption = Preemption(self._tell, now=lambda: self.time)
        self.running = contextlib.ExitStack()

    def _tell(self) -> None:
        self.num_told += 1

    def run(
        self,
        name: str,
        *,
        lane: Lane = Lane.BULK,
        progress: int = 0,
        stream: bool = False,
        keeps_entries: bool = False,
        continuation: Continuation | None = None,
    ) -> None:
        job = msgspec.structs.replace(JOB, lane=lane, stream=stream)
        task = asyncio.create_task(asyncio.Event().wait())
        owned = Owned(job=job, epoch=1, num_absences=0, task=task)  # type: ignore[arg-type]
        source = Stream(
            job,
            1,
            start=Start(epoch=1, continuation=continuation),
            decode_instance="d",
            claim=_never,
            link_to=_never,  # type: ignore[arg-type]
            keeps_entries=keeps_entries,
        )
        for _ in range(progress):
            source.add(0, DecodeOutput(token_ids=[1]))
        self.jobs[name] = owned
        self.running.enter_context(self.preemption.running(owned, source))

    @property
    def given_back(self) -> list[str]:
        return [name for name, owned in self.jobs.items() if owned.is_given_back]


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.running.close()
    tasks = [owned.task for owned in bench.jobs.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_job_with_the_least_progress_goes_and_of_equals_the_one_that_came_last(
    bench: Bench,
) -> None:
    bench.run("first", progress=2)
    bench.run("second", progress=2)
    bench.run("far", progress=9)
    for expected in (["second"], ["first", "second"], ["far", "first", "second"]):
        assert bench.preemption.is_possible()
        bench.preemption.preempt()
        assert sorted(bench.given_back) == expected
    assert not bench.preemption.is_possible()


async def test_only_a_batch_job_is_given_back(bench: Bench) -> None:
    bench.run("person", lane=Lane.RT)
    bench.run("standard", lane=Lane.STD)
    assert not bench.preemption.is_possible()
    bench.preemption.preempt()
    assert (bench.given_back, bench.num_told) == ([], 0)
    bench.run("batch")
    assert (bench.preemption.is_possible(), bench.num_told) == (True, 1)


async def test_a_job_whose_answer_has_begun_stays_unless_the_next_worker_can_go_on_with_it(
    bench: Bench,
) -> None:
    bench.run("seen", progress=1, stream=True)
    assert not bench.preemption.is_possible()
    bench.run("can go on", progress=1, stream=True, keeps_entries=True)
    assert bench.preemption.is_possible()
    bench.time = CONTINUABLE_S
    assert not bench.preemption.is_possible()
    bench.run("unseen", stream=True)
    bench.preemption.preempt()
    assert bench.given_back == ["unseen"]


async def test_an_answer_that_was_taken_up_once_is_not_given_back_again(bench: Bench) -> None:
    """Its beginning was stored some time ago, and may be gone before it is taken up once more."""
    entries = (Tokens(1, 0, 0, b"\x01\x00\x00\x00"),)
    again = Continuation(entries=entries, first_seq=1, rest=None)
    bench.run("again", stream=True, keeps_entries=True, continuation=again)
    assert not bench.preemption.is_possible()
    bench.preemption.preempt()
    assert bench.given_back == []


async def test_a_job_that_has_ended_is_not_given_back(bench: Bench) -> None:
    bench.run("ended")
    bench.running.close()
    bench.preemption.preempt()
    assert bench.given_back == []
