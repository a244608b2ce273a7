"""Which requests share a step with one that waits for its first token ID."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headrace.engine.lane_steps import LaneSteps
from headrace.engine.priorities import engine_priority, lane_of
from headrace.shared.subjects import Lane


@dataclass(eq=False)
class Request:
    request_id: str
    lane: Lane = Lane.RT
    num_output_tokens: int = 0
    status_name: str = "WAITING"
    kv_transfer_params: dict[str, Any] | None = None
    wanted: int = 0

    @property
    def priority(self) -> int:
        return engine_priority(self.lane, self.wanted)

    @property
    def status(self) -> Any:
        return SimpleNamespace(name=self.status_name)


class Queue(list[Request]):
    def remove_requests(self, requests: list[Request]) -> None:
        self[:] = [request for request in self if request not in requests]

    def add_request(self, request: Request) -> None:
        self.append(request)


@dataclass
class Vllms:
    """Schedules all that runs, then what waits, as far as there is room."""

    running: list[Request] = field(default_factory=list)
    waiting: Queue = field(default_factory=Queue)
    max_num_running_reqs: int = 8
    max_num_scheduled_tokens: int = 8192
    num_free: int = 8
    budgets: list[int] = field(default_factory=list)

    def schedule(self) -> Any:
        self.budgets.append(self.max_num_scheduled_tokens)
        assert len(self.running) <= self.max_num_running_reqs
        while self.waiting and self.num_free and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.pop(0)
            request.status_name = "RUNNING"
            self.running.append(request)
            self.num_free -= 1
        names = {request.request_id: 1 for request in self.running}
        return SimpleNamespace(num_scheduled_tokens=names)


class Scheduler(LaneSteps, Vllms):
    num_bulk_step_token_ids = 100
    sits_out = True

    def step(self) -> set[str]:
        return set(self.schedule().num_scheduled_tokens)


def bulk(name: str, **values: Any) -> Request:
    return Request(name, Lane.BULK, **values)


def running(name: str, lane: Lane = Lane.BULK) -> Request:
    return Request(name, lane, num_output_tokens=3, status_name="RUNNING")


def test_batch_work_sits_out_the_step_of_a_first_token_id() -> None:
    urgent = Request("urgent")
    scheduler = Scheduler([running("b1"), running("rt", Lane.RT)], Queue([urgent, bulk("b2")]))
    assert scheduler.step() == {"rt", "urgent"}
    assert {request.request_id for request in scheduler.running} == {"b1", "rt", "urgent"}
    urgent.num_output_tokens = 1
    assert scheduler.step() == {"b1", "b2", "rt", "urgent"}


def test_it_sits_out_every_step_of_a_prompt_that_takes_several() -> None:
    urgent = Request("urgent", status_name="RUNNING")
    scheduler = Scheduler([running("b1"), urgent])
    assert scheduler.step() == scheduler.step() == {"urgent"}


def test_who_has_no_place_without_it_does_not_stop_it() -> None:
    scheduler = Scheduler([running("b1")], Queue([Request("large")]), num_free=0)
    assert scheduler.step() == set()
    assert scheduler.step() == scheduler.step() == {"b1"}
    scheduler.num_free = 1
    assert scheduler.step() == {"b1", "large"}


def test_a_prompt_that_comes_from_elsewhere_needs_no_step_of_its_own() -> None:
    pulled = Request("pulled", kv_transfer_params={"do_remote_prefill": True})
    scheduler = Scheduler([running("b1")], Queue([pulled]))
    assert scheduler.step() == {"b1", "pulled"}
    waits = Request("waits", status_name="WAITING_FOR_REMOTE_KVS")
    assert Scheduler([running("b1"), waits]).step() == {"b1", "waits"}


def test_nobody_waits_for_an_asynchronous_request() -> None:
    scheduler = Scheduler([running("b1")], Queue([Request("later", Lane.STD)]))
    assert scheduler.step() == {"b1", "later"}


def test_there_are_never_more_than_the_engine_has_room_for() -> None:
    scheduler = Scheduler([running("b1"), running("b2")], Queue([Request("urgent")]))
    scheduler.max_num_running_reqs = 2
    assert scheduler.step() == {"b1", "b2"}
    del scheduler.running[0]
    assert scheduler.step() == {"urgent"}
    assert scheduler.step() == {"urgent"}


def test_a_step_with_batch_work_is_short_and_any_other_is_not() -> None:
    scheduler = Scheduler([running("b1"), running("rt", Lane.RT)])
    scheduler.step()
    scheduler.running.append(Request("urgent", status_name="RUNNING"))
    scheduler.step()
    scheduler.running = [running("rt", Lane.RT)]
    scheduler.step()
    scheduler.waiting.append(bulk("b2"))
    scheduler.max_num_running_reqs = 80
    scheduler.step()
    scheduler.max_num_scheduled_tokens = 64
    scheduler.step()
    assert scheduler.budgets == [100, 8192, 8192, 160, 64]
    assert scheduler.max_num_scheduled_tokens == 64


def test_steps_that_are_launched_ahead_are_short_and_shared() -> None:
    scheduler = Scheduler([running("b1")], Queue([Request("urgent")]))
    scheduler.sits_out = False
    assert scheduler.step() == {"b1", "urgent"}
    assert scheduler.budgets == [100]


def test_a_clients_own_priority_does_not_change_the_lane() -> None:
    for lane in Lane:
        for wanted in (-(10**9), -1, 0, 1, 10**9):
            assert lane_of(engine_priority(lane, wanted)) is lane
    assert lane_of(-(10**9)) is Lane.RT
    assert lane_of(10**9) is Lane.BULK
