"""One prefill task on its way: what decode is told, when the task is acked, and what ends the computation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from headrace.prefill import errand as errand_module
from headrace.prefill.errand import Answer, Errand
from headrace.shared import token_ids, wire
from headrace.shared.errors import (
    BrokerError,
    EngineDeadError,
    HeadraceError,
    NoWorkerError,
    PayloadTooLargeError,
)
from headrace.shared.messages import (
    Handoff,
    PrefillFailed,
    PrefillNoted,
    PrefillStarted,
    PrefillTask,
)
from headrace.shared.wire import Message

# Unix seconds, in the year 2242. What a module reads off a clock is old by the time that its tests run.
LATER = 2.0**33
TASK = PrefillTask(
    task_id="t",
    request_id="r",
    tenant="default",
    decode_instance="decode-1",
    published=1.0,
    expires=LATER,
    contract="c",
    token_ids=token_ids.pack([5]),
    prompt_hash="h",
)
HANDOFF = Handoff(
    task_id="t",
    request_id="r",
    prefill_instance="prefill-1",
    epoch="e",
    contract="c",
    prompt_hash="h",
    expires=LATER,
    kv_transfer_params={},
    prefill_queue_s=0.0,
    prefill_s=0.0,
)
NEVER = "never"
Reply = bool | HeadraceError | str


class Decode:
    """The decode worker that asked, and the broker between; answers what it is told as the test says."""

    instance = "prefill-1"

    def __init__(self) -> None:
        self.broker = self.table = self.pulse = self
        self.replies: dict[type[Message], list[Reply]] = {}
        self.told: asyncio.Queue[Message] = asyncio.Queue()
        self.lose: Callable[[], None]
        self.events: list[str] = []
        self.acked = asyncio.Event()
        self.cannot_ack = False

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        assert subject.endswith(".kv.decode-1")
        message = wire.decode(payload, PrefillStarted, Handoff, PrefillFailed)
        self.told.put_nowait(message)
        replies = self.replies.get(type(message), [])
        reply = replies.pop(0) if replies else True
        if isinstance(reply, HeadraceError):
            raise reply
        if reply == NEVER:
            await asyncio.Event().wait()
        self.events.append(wire.tag_of(type(message)))
        return wire.encode(PrefillNoted(wanted=bool(reply)))

    def clock_offset(self, instance: str) -> float:
        return 0.0

    def watch(self, instance: str, on_lost: Callable[[], None]) -> Callable[[], None]:
        self.lose = on_lost
        return lambda: None

    # the delivery
    @contextlib.asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[None]:
        yield

    async def ack(self) -> None:
        self.events.append("ack")
        self.acked.set()
        if self.cannot_ack:
            raise BrokerError("away")


class Engine:
    """Computes until the test lets it go on."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.begun = asyncio.Event()
        self.aborted = False
        self.dropped: list[Handoff] = []

    async def drop(self, handoff: Handoff) -> None:
        self.dropped.append(handoff)

    async def compute(self, task: PrefillTask) -> Answer:
        self.begun.set()
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.aborted = True
            raise


def start(decode: Any, engine: Engine, task: PrefillTask = TASK) -> asyncio.Task[Answer | None]:
    errand = Errand(decode, task, engine.compute, engine.drop)
    return asyncio.create_task(errand.run(decode))


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Decode:
    monkeypatch.setattr(errand_module, "RETRY_S", 0.0)
    return Decode()


async def test_the_task_is_acked_once_decode_knows_who_computes_it(decode: Decode) -> None:
    engine = Engine()
    running = start(decode, engine)
    await decode.acked.wait()
    assert isinstance(await decode.told.get(), PrefillStarted)
    engine.result.set_result(HANDOFF)
    assert await running == HANDOFF
    assert decode.events == ["started.v1", "ack", "handoff.v1"]


@pytest.mark.parametrize("reply", [False, NoWorkerError("nobody listens")], ids=["no", "gone"])
async def test_a_task_that_nobody_waits_for_is_aborted_and_acked(
    decode: Decode, reply: Reply
) -> None:
    decode.replies = {PrefillStarted: [reply]}
    engine = Engine()
    assert await start(decode, engine) is None
    assert engine.aborted or not engine.begun.is_set()
    assert decode.events[-1] == "ack"
    assert decode.told.qsize() == 1


async def test_what_decode_did_not_note_is_said_again(decode: Decode) -> None:
    lost = BrokerError("no answer within 1 s")
    decode.replies = {PrefillStarted: [lost], Handoff: [lost, NoWorkerError("away"), lost]}
    engine = Engine()
    running = start(decode, engine)
    await decode.acked.wait()
    engine.result.set_result(HANDOFF)
    assert await running == HANDOFF
    assert decode.told.qsize() == 6


async def test_a_quick_answer_does_not_wait_for_decode_to_note_the_start(decode: Decode) -> None:
    decode.replies = {PrefillStarted: [NEVER]}
    engine = Engine()
    engine.result.set_result(HANDOFF)
    assert await start(decode, engine) == HANDOFF
    assert decode.events == ["ack", "handoff.v1"]


@pytest.mark.parametrize("reply", [NEVER, True], ids=["before the start is noted", "after"])
async def test_a_computation_ends_when_its_decode_worker_is_lost(
    decode: Decode, reply: Reply
) -> None:
    decode.replies = {PrefillStarted: [reply]}
    engine = Engine()
    running = start(decode, engine)
    await decode.told.get()
    await engine.begun.wait()
    if reply is True:
        await decode.acked.wait()
    decode.lose()
    assert await running is None
    assert engine.aborted
    assert decode.told.empty()


async def test_a_handoff_is_not_offered_for_ever_to_a_decode_worker_that_is_lost(
    decode: Decode,
) -> None:
    decode.replies = {Handoff: [NEVER]}
    engine = Engine()
    running = start(decode, engine)
    engine.result.set_result(HANDOFF)
    while not isinstance(await decode.told.get(), Handoff):
        pass
    decode.lose()
    assert await running is None


async def test_a_handoff_whose_lease_is_over_is_not_offered(decode: Decode) -> None:
    engine = Engine()
    engine.result.set_result(msgspec.structs.replace(HANDOFF, expires=time.time() - 1))
    assert await start(decode, engine) is None
    assert "handoff.v1" not in decode.events


async def test_decode_is_told_when_the_engine_dies(decode: Decode) -> None:
    engine = Engine()
    running = start(decode, engine)
    await decode.acked.wait()
    engine.result.set_exception(EngineDeadError("dead"))
    with pytest.raises(EngineDeadError):
        await running
    *_, last = [decode.told.get_nowait() for _ in range(decode.told.qsize())]
    assert isinstance(last, PrefillFailed)
    assert last.failure.retryable


async def test_decode_is_told_when_the_handoff_is_too_large_to_send(decode: Decode) -> None:
    decode.replies = {Handoff: [PayloadTooLargeError("too large")]}
    engine = Engine()
    engine.result.set_result(HANDOFF)
    answer = await start(decode, engine)
    assert isinstance(answer, PrefillFailed)
    assert answer.failure.code == "payload_too_large"
    assert engine.dropped == [HANDOFF]


async def test_a_task_that_cannot_be_acked_is_computed_all_the_same(decode: Decode) -> None:
    decode.cannot_ack = True
    engine = Engine()
    running = start(decode, engine)
    await decode.acked.wait()
    engine.result.set_result(HANDOFF)
    assert await running == HANDOFF


AWAY = NoWorkerError("nobody listens")
LOST = BrokerError("no answer within 1 s")


@pytest.mark.parametrize(
    ("replies", "is_dropped"),
    [
        ([AWAY] * 3, True),
        ([AWAY, LOST, AWAY], False),
        ([LOST, AWAY, AWAY], False),
        ([AWAY, NEVER], False),
        ([True], False),
    ],
    ids=["never there", "once in between", "once at first", "under way", "noted"],
)
async def test_only_the_blocks_of_a_handoff_that_decode_can_not_have_are_freed_at_once(
    decode: Decode, replies: list[Reply], is_dropped: bool
) -> None:
    """A decode worker that is lost may be cut off from the broker alone, and pull."""
    num_told = len(replies)
    decode.replies = {Handoff: replies + [AWAY] * 100_000}
    engine = Engine()
    engine.result.set_result(HANDOFF)
    running = start(decode, engine)
    async with asyncio.timeout(30):
        while num_told:
            num_told -= isinstance(await decode.told.get(), Handoff)
        if replies != [True]:
            decode.lose()
        await running
    assert engine.dropped == [HANDOFF] * is_dropped
