"""What decode asks prefill workers for, whom it asks, and which of their answers it takes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from headrace.decode.pending import AttemptFailedError
from headrace.decode.prefill_leg import PrefillLeg
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import EngineInfo
from headrace.engine.priorities import engine_priority
from headrace.shared import subjects, token_ids, wire
from headrace.shared.broker import Received
from headrace.shared.errors import BadRequestError, BrokerError, HandoffError, NoWorkerError
from headrace.shared.messages import (
    Failure,
    Handoff,
    Heartbeat,
    Job,
    PrefillFailed,
    PrefillNoted,
    PrefillStarted,
    PrefillTask,
    Prompt,
)
from headrace.shared.subjects import Lane, Role
from headrace.shared.tracing import OFF
from headrace.shared.wire import Message

INFO = EngineInfo(
    engine_id="d",
    block_size=16,
    num_blocks=8,
    max_model_len=512,
    vocab_size=257,
    block_bytes=1,
    lease_s=30.0,
)
IDS = [5, 6, 7]
PROMPT = Prompt(
    token_ids=token_ids.pack(IDS), sampling_params=b"", cache_salt="salt", prompt_logprobs=2
)
JOB = Job(
    request_id="r",
    tenant="acme",
    model="m",
    lane=Lane.RT,
    endpoint="completions",
    created=1,
    published=1.0,
    deadline=90.0,
    contract="c",
    body=b"{}",
    stream=False,
    prompts=(PROMPT,),
    priority=7,
)
NOW = 2.0
POOL = "m_c"


class Worker:
    """A decode worker among prefill workers: a broker, a table, a pulse and peers in one, all told by the test."""

    instance, contract, slug, pool, tracer = "decode-1", "c", "m", POOL, OFF

    def __init__(self, *prefills: str) -> None:
        self.broker = self.table = self.pulse = self.peers = self.engine = self
        self.beats = {name: beat(name) for name in prefills}
        self.offsets: dict[str, float] = {}
        self.unusable: set[str] = set()
        self.watched: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self.published: asyncio.Queue[tuple[str, PrefillTask, str]] = asyncio.Queue()
        self.noted: asyncio.Queue[bool] = asyncio.Queue()
        self.released: list[str] = []
        self.reconnect: Callable[[], Awaitable[None]]
        self.broken = False
        self._changed = asyncio.Event()
        self._receive: Callable[[Received], None]

    # the broker
    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self.reconnect = callback

    async def subscribe(self, subject: str, callback: Callable[[Received], None]) -> None:
        self._receive = callback

    async def publish_durable(self, subject: str, payload: bytes, *, message_id: str) -> None:
        if self.broken:
            raise BrokerError("away")
        self.published.put_nowait((subject, wire.decode(payload, PrefillTask), message_id))

    async def respond(self, received: Received, payload: bytes) -> None:
        self.noted.put_nowait(wire.decode(payload, PrefillNoted).wanted)

    # the table
    def workers(self) -> list[Heartbeat]:
        return list(self.beats.values())

    def ready(self, role: Role, **by: str) -> list[Heartbeat]:
        return self.workers()

    def clock_offset(self, instance: str) -> float:
        return self.offsets.get(instance, 0.0)

    async def wait_for(self, predicate: Callable[[Any], bool]) -> None:
        while not predicate(self):
            await self._changed.wait()
            self._changed.clear()

    def leave(self, instance: str) -> None:
        del self.beats[instance]
        self._changed.set()

    # the pulse
    def watch(self, instance: str, on_lost: Callable[[], None]) -> Callable[[], None]:
        self.watched[instance].append(on_lost)

        def end() -> None:
            if on_lost in self.watched[instance]:
                self.watched[instance].remove(on_lost)

        return end

    def lose(self, instance: str) -> None:
        for call in self.watched.pop(instance):
            call()

    # the peers
    def is_usable(self, instance: str) -> bool:
        return instance not in self.unusable

    # the engine
    async def release_handoff(self, kv_transfer_params: dict[str, Any]) -> None:
        self.released.append(kv_transfer_params["remote_request_id"].rpartition("-")[2])

    def say(self, message: Message) -> None:
        """Let a prefill worker say something on this worker's subject."""
        self._receive(Received("kv", wire.encode(message), {}, "_INBOX"))


def beat(name: str, num_running: int = 0) -> Heartbeat:
    return Heartbeat(
        role=Role.PREFILL,
        instance=name,
        model="m",
        contract="c",
        state="ready",
        slots=8,
        num_running=num_running,
        epoch=f"engine of {name}",
    )


def started(task: PrefillTask, by: str) -> PrefillStarted:
    return PrefillStarted(task_id=task.task_id, request_id=task.request_id, prefill_instance=by)


def failed(task: PrefillTask, by: str, *, code: str = "engine_error", **more: Any) -> PrefillFailed:
    failure: dict[str, Any] = {
        "code": code,
        "message": "no",
        "http_status": 500,
        "error_type": "InternalServerError",
        "retryable": True,
    }
    return PrefillFailed(
        task_id=task.task_id,
        request_id=task.request_id,
        prefill_instance=by,
        failure=Failure(**failure | more),
    )


def handoff(task: PrefillTask, by: str, *, run: int = 1, expires: float = 32.0) -> Handoff:
    return Handoff(
        task_id=task.task_id,
        request_id=task.request_id,
        prefill_instance=by,
        epoch=f"engine of {by}",
        contract=task.contract,
        prompt_hash=task.prompt_hash,
        expires=expires,
        kv_transfer_params={
            "do_remote_prefill": True,
            "remote_block_ids": [[1]],
            "remote_engine_id": f"engine of {by}",
            "remote_request_id": f"{task.task_id}-{by}.{run}",
            "remote_host": "127.0.0.1",
            "remote_port": 4711,
            "tp_size": 1,
            "remote_num_tokens": 3,
        },
        prefill_queue_s=0.0,
        prefill_s=0.0,
        prompt_logprobs=expected_prompt_logprobs(
            token_ids.unpack(task.token_ids), task.prompt_logprobs
        ),
    )


class Case:
    """A leg, its worker, and one attempt that runs."""

    def __init__(self, *prefills: str) -> None:
        self.worker: Any = Worker(*prefills)
        self.leg = PrefillLeg(
            self.worker,
            self.worker,
            INFO,
            self.worker,
            timeout_s=60.0,
            margin_s=5.0,
            now=lambda: NOW,
        )
        self.failed: set[str] = set()

    async def ask(self) -> tuple[asyncio.Task[Handoff], PrefillTask, str]:
        """Return the running attempt, its task, and the subject that it went to."""
        if not hasattr(self.worker, "_receive"):
            await self.leg.start()
        attempt = asyncio.create_task(self.leg.compute(JOB, PROMPT, self.failed))
        subject, task, _ = await self.worker.published.get()
        return attempt, task, subject


async def test_salt_priority_and_logprobs_of_the_job_stand_in_the_task() -> None:
    case = Case("p1")
    attempt, task, subject = await case.ask()
    case.worker.say(handoff(task, "p1"))
    assert (await attempt).prompt_logprobs == expected_prompt_logprobs(IDS, 2)
    assert subject == subjects.prefill(POOL, Lane.RT)
    assert (task.priority, task.cache_salt, task.prompt_logprobs) == (
        engine_priority(JOB.lane, JOB.priority),
        "salt",
        2,
    )
    assert task.prompt_hash == token_ids.prompt_hash(PROMPT.token_ids, "salt")
    assert (task.tenant, task.request_id) == ("acme", "r")


async def test_the_first_worker_that_starts_a_task_has_it_and_others_are_told_so() -> None:
    case = Case("p1", "p2")
    attempt, task, _ = await case.ask()
    said = [started(task, "p1"), started(task, "p2"), started(task, "p1")]
    for message in (*said, msgspec.structs.replace(said[0], task_id="unknown")):
        case.worker.say(message)
    assert [await case.worker.noted.get() for _ in range(4)] == [True, False, True, False]
    case.worker.say(handoff(task, "p1"))
    await attempt
    case.worker.say(started(task, "p1"))  # it is over
    assert [await case.worker.noted.get() for _ in range(2)] == [True, False]


async def test_when_the_worker_of_a_task_is_lost_the_next_attempt_goes_to_the_least_loaded_other() -> (
    None
):
    case = Case("p1")
    case.worker.beats |= {"p2": beat("p2", num_running=3), "p3": beat("p3", num_running=1)}
    attempt, task, _ = await case.ask()
    case.worker.say(started(task, "p1"))
    assert case.worker.watched["p2"] == case.worker.watched["p3"] == []
    case.worker.lose("p1")
    with pytest.raises(AttemptFailedError, match="p1 is gone"):
        await attempt
    assert case.failed == {"p1"}
    again, other, subject = await case.ask()
    assert subject == subjects.prefill_worker(POOL, "p3")
    assert other.task_id != task.task_id
    case.worker.say(handoff(other, "p3"))
    assert (await again).prefill_instance == "p3"


async def test_a_task_whose_worker_died_before_it_could_say_so_is_published_again() -> None:
    case = Case("p1", "p2")
    attempt, task, _ = await case.ask()
    case.worker.lose("p1")
    subject, again, message_id = await case.worker.published.get()
    assert (subject, again, message_id) == (
        subjects.prefill(POOL, Lane.RT),
        task,
        f"{task.task_id}.1",
    )
    case.worker.say(handoff(task, "p2"))
    await attempt


async def test_after_a_reconnect_each_task_is_published_again_to_whoever_may_have_it() -> None:
    case = Case("p1", "p2")
    one, first, _ = await case.ask()
    two, second, _ = await case.ask()
    case.worker.say(started(first, "p1"))
    await case.worker.reconnect()
    for task, subject in (
        (first, subjects.prefill_worker(POOL, "p1")),
        (second, subjects.prefill(POOL, Lane.RT)),
    ):
        assert case.worker.published.get_nowait() == (subject, task, f"{task.task_id}.1")
    assert case.worker.published.empty()
    for task, attempt in ((first, one), (second, two)):
        case.worker.say(handoff(task, "p1", run=attempt is one))
        await attempt


async def test_a_task_on_one_workers_queue_fails_when_that_worker_takes_no_more() -> None:
    case = Case("p1", "p2")
    case.failed = {"p1"}
    attempt, _, subject = await case.ask()
    assert subject == subjects.prefill_worker(POOL, "p2")
    case.worker.leave("p2")
    with pytest.raises(AttemptFailedError):
        await attempt
    assert case.failed == {"p1", "p2"}


async def test_a_worker_that_has_started_may_drain() -> None:
    case = Case("p1")
    attempt, task, _ = await case.ask()
    case.worker.say(started(task, "p1"))
    case.worker.leave("p1")
    case.worker.say(handoff(task, "p1"))
    await attempt


async def test_nobody_is_asked_who_cannot_be_pulled_from() -> None:
    case = Case("p1", "p2")
    case.worker.unusable = {"p1"}
    attempt, task, subject = await case.ask()
    assert subject == subjects.prefill_worker(POOL, "p2")
    case.worker.say(handoff(task, "p2"))
    await attempt
    case.worker.unusable = {"p1", "p2"}
    assert not case.leg.has_worker()
    with pytest.raises(NoWorkerError):
        await case.leg.compute(JOB, PROMPT, set())


async def test_the_prompt_is_computed_here_when_the_broker_takes_no_task() -> None:
    case = Case("p1")
    case.worker.broken = True
    with pytest.raises(NoWorkerError, match="reaches no prefill worker"):
        await case.leg.compute(JOB, PROMPT, set())


@pytest.mark.parametrize(
    ("failure", "error", "excluded"),
    [
        ({}, AttemptFailedError, {"p1"}),
        ({"code": "no_worker"}, AttemptFailedError, {"p1"}),
        ({"code": "bad_request", "retryable": False}, BadRequestError, set()),
        ({"code": "expired", "retryable": False}, NoWorkerError, set()),
    ],
    ids=["engine", "another contract", "bad prompt", "too slow"],
)
async def test_what_a_failure_that_prefill_reports_means(
    failure: dict[str, Any], error: type[Exception], excluded: set[str]
) -> None:
    case = Case("p1")
    attempt, task, _ = await case.ask()
    case.worker.say(failed(task, "p1", **failure))
    with pytest.raises(error):
        await attempt
    assert case.failed == excluded


async def test_the_failure_of_a_copy_does_not_end_what_another_worker_computes() -> None:
    case = Case("p1", "p2")
    attempt, task, _ = await case.ask()
    case.worker.say(started(task, "p1"))
    case.worker.say(failed(task, "p2"))
    case.worker.say(handoff(task, "p1"))
    assert (await attempt).prefill_instance == "p1"


async def test_a_handoff_that_comes_again_is_not_given_back_while_it_may_be_in_use() -> None:
    case = Case("p1", "p2")
    attempt, task, _ = await case.ask()
    taken = handoff(task, "p1")
    case.worker.say(taken)
    assert await attempt == taken
    case.worker.say(taken)
    case.worker.say(handoff(task, "p1", run=2))
    case.worker.say(handoff(task, "p2"))
    for _ in range(4):  # each is noted, so that nobody says it again
        assert await case.worker.noted.get()
    assert case.worker.released == ["p1.2", "p2.1"]


async def test_a_handoff_that_another_task_has_used_fails_the_attempt_at_once() -> None:
    case = Case("p1")
    attempt, task, _ = await case.ask()
    used = handoff(task, "p1")
    case.worker.say(used)
    await attempt
    attempt, task, _ = await case.ask()
    case.worker.say(started(task, "p1"))
    case.worker.say(msgspec.structs.replace(used, task_id=task.task_id))
    with pytest.raises(AttemptFailedError, match="brought what was used"):
        await attempt
    assert case.failed == {"p1"}
    assert case.worker.released == []


async def test_a_handoff_that_came_as_its_job_was_cancelled_is_given_back() -> None:
    case = Case("p1")
    attempt, task, _ = await case.ask()
    case.worker.say(handoff(task, "p1"))
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    await case.worker.noted.get()
    assert case.worker.released == ["p1.1"]
    assert case.worker.watched == {"p1": []}


@pytest.mark.parametrize("ahead_s", [0.0, 60.0, -60.0])
async def test_a_lease_is_judged_by_the_clock_of_the_worker_that_gave_it(ahead_s: float) -> None:
    case = Case("p1")
    case.worker.offsets["p1"] = -ahead_s
    attempt, task, _ = await case.ask()
    case.worker.say(handoff(task, "p1", expires=NOW + ahead_s + 30.0))
    await attempt
    attempt, task, _ = await case.ask()
    case.worker.say(handoff(task, "p1", run=2, expires=NOW + ahead_s + 4.0))
    with pytest.raises(HandoffError, match=r"the lease ends in 4\.0 s"):
        await attempt
    assert case.failed == {"p1"}
