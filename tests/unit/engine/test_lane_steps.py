"""Which requests share a step with one that waits for its first token ID."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headrace.engine.lane_steps import MAX_ASIDE, LaneSteps
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
    num_tokens: int = 100
    num_computed_tokens: int = 0

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
    """Schedules all that runs, then what waits, as far as there is room; a prompt takes a block of each 16 IDs."""

    running: list[Request] = field(default_factory=list)
    waiting: Queue = field(default_factory=Queue)
    pulling: list[Request] = field(default_factory=list)  #: waits too, and is in another queue
    max_num_running_reqs: int = 8
    max_num_scheduled_tokens: int = 8192
    num_spec_tokens: int = 0
    num_stages: int = 1
    num_free: int = 1_000
    is_chunked: bool = True
    budgets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache_config = SimpleNamespace(block_size=16)
        pool = SimpleNamespace(get_num_free_blocks=lambda: self.num_free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    @property
    def scheduler_config(self) -> Any:
        return SimpleNamespace(enable_chunked_prefill=self.is_chunked)

    @property
    def parallel_config(self) -> Any:
        return SimpleNamespace(pipeline_parallel_size=self.num_stages)

    @property
    def requests(self) -> dict[str, Request]:
        return {r.request_id: r for r in [*self.running, *self.waiting, *self.pulling]}

    def schedule(self) -> Any:
        assert len(self.running) <= self.max_num_running_reqs
        self.budgets.append(self.max_num_scheduled_tokens)
        for queue in (self.pulling, self.waiting):
            while queue and len(self.running) < self.max_num_running_reqs:
                if (num := queue[0].num_tokens // 16) > self.num_free:
                    break
                request = queue.pop(0)
                request.status_name = "RUNNING"
                self.running.append(request)
                self.num_free -= num
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


def test_where_blocks_are_short_it_is_not_set_aside() -> None:
    """vLLM takes blocks from what is in the step alone: an answer would lose its own, and the batch keep them."""
    scheduler = Scheduler([running("b1"), running("rt", Lane.RT)], Queue([Request("urgent")]))
    scheduler.num_free = 3
    assert scheduler.step() == {"b1", "rt"}


def test_who_has_no_place_without_it_does_not_stop_it() -> None:
    scheduler = Scheduler([running("b1")], Queue([Request("refused")]))
    scheduler.max_num_running_reqs = 2
    vllms = Vllms.schedule
    try:
        Vllms.schedule = lambda self: SimpleNamespace(  # type: ignore[method-assign]
            num_scheduled_tokens={r.request_id: 1 for r in self.running}
        )
        assert scheduler.step() == set()
        assert scheduler.step() == scheduler.step() == {"b1"}
    finally:
        Vllms.schedule = vllms  # type: ignore[method-assign]
    assert scheduler.step() == {"b1", "refused"}


def test_it_goes_on_however_many_come() -> None:
    scheduler = Scheduler([running("b1")])
    steps = []
    for number in range(MAX_ASIDE + 2):
        scheduler.running = [*scheduler.running[:1], Request(f"rt{number}", status_name="RUNNING")]
        steps.append("b1" in scheduler.step())
        scheduler.running.sort(key=lambda request: -request.priority)
    assert steps == [*[False] * MAX_ASIDE, True, False]


def test_a_prompt_that_comes_from_elsewhere_needs_no_step_of_its_own() -> None:
    pulled = Request("pulled", kv_transfer_params={"do_remote_prefill": True})
    scheduler = Scheduler([running("b1")], Queue([pulled]))
    assert scheduler.step() == {"b1", "pulled"}
    waits = Request("waits", status_name="WAITING_FOR_REMOTE_KVS")
    assert Scheduler([running("b1"), waits]).step() == {"b1", "waits"}


def test_a_pull_of_the_batchs_is_asked_for_in_any_step() -> None:
    pulled = bulk("b2", kv_transfer_params={"do_remote_prefill": True})
    scheduler = Scheduler([running("b1")], Queue([Request("urgent"), pulled, bulk("b3")]))
    assert scheduler.step() == {"urgent", "b2"}


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


def test_those_whose_blocks_come_are_counted_too() -> None:
    scheduler = Scheduler([running("b1"), running("b2")], Queue([Request("urgent")]))
    scheduler.pulling.append(Request("pulled"))
    scheduler.max_num_running_reqs = 3
    assert scheduler.step() == {"b1", "b2", "pulled"}
    assert len(scheduler.running) == 3


def test_where_steps_overlap_they_are_shared() -> None:
    scheduler = Scheduler([running("b1")], Queue([Request("urgent")]))
    scheduler.num_stages = 2
    assert scheduler.step() == {"b1", "urgent"}


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
    scheduler.max_num_scheduled_tokens, scheduler.num_spec_tokens = 8192, 4
    scheduler.step()
    scheduler.is_chunked = False
    scheduler.step()
    assert scheduler.budgets == [100, 8192, 8192, 176, 64, 496, 8192]
    assert scheduler.max_num_scheduled_tokens == 8192


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
