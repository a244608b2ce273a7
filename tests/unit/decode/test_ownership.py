"""How a worker learns that a job is another one's by now."""

from __future__ import annotations

import asyncio
import contextlib
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
        if subject == subjects.takeover_all():
            self.handler = handler


class Worker:
    instance = "decode-1"

    def __init__(self) -> None:
        self.broker = Broker()

    async def hand_back(self, delivery: Again) -> None:
        delivery.settled.append("handed back")


class Succession:
    """Reads that the job has this owner."""

    epoch = 1
    num_reads = 0

    async def later_owner(self, job: Job, epoch: int) -> int:
        self.num_reads += 1
        return self.epoch if self.epoch > epoch else 0


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


class Again:
    """A delivery of a job to the worker that has it, and how it was settled."""

    def __init__(self, num_delivered: int) -> None:
        self.num_delivered = num_delivered
        self.settled: list[str] = []

    async def ack(self) -> None:
        self.settled.append("ack")


@pytest.mark.parametrize(
    ("how", "num_delivered", "settled", "is_settled"),
    [
        ("acked", 2, ["ack"], True),
        ("failed", 2, ["handed back"], True),
        ("superseded by the second owner", 3, [], False),
        ("superseded by the second owner", 2, [], False),
        ("superseded by the fourth owner", 3, [], True),
    ],
)
async def test_a_job_that_comes_again_to_its_owner_is_settled_worked_on_or_a_later_owners(
    case: Case, how: str, num_delivered: int, settled: list[str], is_settled: bool
) -> None:
    again: Any = Again(num_delivered)
    begun = asyncio.Event()

    async def own() -> None:
        with case.ownership.hold(JOB, 1) as owned:
            begun.set()
            await asyncio.sleep(0)  # the other delivery waits by now
            if how == "acked":
                owned.ended.set_result(True)
            elif how != "failed":
                epoch = 2 if "second" in how else 4
                case.worker.broker.handler(heard(epoch, "decode-2"))
                await asyncio.Event().wait()

    owning = asyncio.create_task(own())
    await begun.wait()
    async with asyncio.timeout(10):
        assert await case.ownership.settled(JOB, again) is is_settled
    assert again.settled == settled
    await asyncio.gather(owning, return_exceptions=True)


async def test_of_two_deliveries_of_a_lost_job_one_is_worked_on_and_the_other_waits_for_it(
    case: Case,
) -> None:
    acked = asyncio.Event()
    order: list[str] = []

    async def again(number: int, delivery: Any) -> None:
        if await case.ownership.settled(JOB, delivery):
            order.append(f"{number} settled")
            return
        with case.ownership.hold(JOB, number) as owned:
            order.append(f"{number} owns")
            await acked.wait()
            owned.ended.set_result(True)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        with case.ownership.hold(JOB, 1) as owned:
            second = group.create_task(again(2, Again(2)))
            third = group.create_task(again(3, Again(3)))
            await asyncio.sleep(0)
            owned.superseded_by = 2
        while not order:  # noqa: ASYNC110  # both are tasks of this loop
            await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()
        acked.set()
    assert order == ["2 owns", "3 settled"]


@pytest.mark.parametrize("how", ["given back", "taken over", "acked"])
async def test_who_asks_hears_of_a_job_that_will_be_ended_here_alone(case: Case, how: str) -> None:
    assert not case.ownership._has("t", "r")
    with contextlib.suppress(asyncio.CancelledError), case.ownership.hold(JOB, 1) as owned:
        assert case.ownership._has("t", "r")
        assert not case.ownership._has("t", "another")
        if how == "given back":
            owned.give_back()
        elif how == "taken over":
            owned.supersede(2)
        else:
            owned.ended.set_result(True)
        assert not case.ownership._has("t", "r")
        await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
