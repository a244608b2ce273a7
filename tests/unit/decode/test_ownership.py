"""How a worker learns that a job is another one's by now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.decode import owned as module
from headrace.decode.owned import Absences
from headrace.decode.ownership import Ownership
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.messages import Job, Takeover
from headrace.shared.subjects import Lane

JOB = Job(
    request_id="r",
    tenant="t",
    model="m",
    lane=Lane.RT,
    endpoint="completions",
    created=0,
    published=0.0,
    deadline=1.0,
    contract="c",
    body=b"{}",
    stream=True,
    prompts=(),
)


class Broker:
    num_losses = 0

    async def subscribe(self, subject: str, handler: Callable[[Received], None]) -> None:
        self.handler = handler


class Worker:
    instance = "decode-1"

    def __init__(self) -> None:
        self.broker = Broker()


class Succession:
    """Reads that the job has this owner."""

    epoch = 1
    num_reads = 0

    async def is_superseded(self, job: Job, epoch: int) -> bool:
        self.num_reads += 1
        return self.epoch > epoch


class Case:
    def __init__(self) -> None:
        self.worker: Any = Worker()
        self.succession: Any = Succession()
        self.ownership = Ownership(self.worker, self.succession)

    async def work(self, *steps: Callable[[], None]) -> bool:
        """Return whether the job is acked: what follows on each step is a check."""
        with self.ownership.hold(JOB, 1) as owned:
            try:
                for step in steps:
                    step()
                    await self.ownership.check(owned)
            except asyncio.CancelledError:
                assert owned.is_superseded
                owned.task.uncancel()
                return False
            return True


@pytest.fixture
async def case() -> Case:
    found = Case()
    await found.ownership.start()
    return found


def lose_the_broker(case: Case) -> None:
    case.worker.broker.num_losses += 1


async def test_without_an_absence_nothing_is_read(case: Case) -> None:
    case.succession.epoch = 2
    assert await case.work(lambda: None)
    assert case.succession.num_reads == 0


async def test_after_an_absence_it_is_read_once_whose_the_job_is(case: Case) -> None:
    assert await case.work(lambda: lose_the_broker(case), lambda: None)
    assert case.succession.num_reads == 1


async def test_a_job_that_was_taken_over_meanwhile_is_not_acked(case: Case) -> None:
    case.succession.epoch = 2
    assert not await case.work(lambda: lose_the_broker(case))


def heard(epoch: int, instance: str) -> Received:
    takeover = Takeover(request_id="r", tenant="t", epoch=epoch, seq=0, decode_instance=instance)
    return Received(subjects.takeover("t", "r"), wire.encode(takeover), {}, "")


@pytest.mark.parametrize(
    ("epoch", "instance", "stays"),
    [(2, "decode-2", False), (1, "decode-2", True), (2, "decode-1", True)],
    ids=["a later owner's", "its own epoch's", "its own"],
)
async def test_a_later_owners_takeover_ends_the_work_at_once(
    case: Case, epoch: int, instance: str, stays: bool
) -> None:
    with case.ownership.hold(JOB, 1) as owned:
        case.worker.broker.handler(heard(epoch, instance))
        assert owned.is_superseded is not stays
        if not stays:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0)
            owned.task.uncancel()


def test_a_stop_is_seen_by_the_clock_and_a_lost_broker_by_its_count() -> None:
    now, losses = 0.0, 0
    absences = Absences(lambda: losses, now=lambda: now)
    now += module.ABSENT_S
    assert absences.count() == 0
    now += module.ABSENT_S + 0.1
    assert absences.count() == 1
    assert absences.count() == 1
    losses += 1
    assert absences.count() == 2
