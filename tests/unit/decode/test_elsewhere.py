"""Whether another decode worker has a job, when the broker may have forgotten to whom it gave it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.decode import elsewhere as module
from headrace.decode.elsewhere import Elsewhere
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import BrokerError, NoWorkerError
from headrace.shared.messages import AskOwner, Owner
from headrace.shared.subjects import Role

from .test_ownership import JOB


class Broker:
    """Has what each peer says: of each question the next, and the last one for ever."""

    def __init__(self) -> None:
        self.back_at = 0.0
        self.num_losses = 0
        self.is_connected = True
        self.says: dict[str, list[bool | Exception]] = {}
        self.asked: list[str] = []
        self.responses: list[bytes] = []
        self.handler: Callable[[Received], None] | None = None
        self.on_request: Callable[[], None] = lambda: None
        self.responded = asyncio.Event()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        assert wire.decode(payload, AskOwner).request_id == JOB.request_id
        name = subject.rpartition(".")[2]
        assert subject == subjects.owner(name)
        self.asked.append(name)
        self.on_request()
        said = self.says[name].pop(0) if len(self.says[name]) > 1 else self.says[name][0]
        if isinstance(said, Exception):
            raise said
        return wire.encode(Owner(is_owner=said))

    async def subscribe(self, subject: str, handler: Callable[[Received], None]) -> None:
        assert subject == subjects.owner("decode-0")
        self.handler = handler

    async def respond(self, received: Received, payload: bytes) -> None:
        self.responses.append(payload)
        self.responded.set()


class Case:
    def __init__(self) -> None:
        self.broker = Broker()
        self.there = ["decode-0", "decode-1"]
        table = SimpleNamespace(workers=lambda: [self.beat(name) for name in self.there])
        worker: Any = SimpleNamespace(
            broker=self.broker, table=table, contract="c", instance="decode-0"
        )
        self.elsewhere = Elsewhere(worker, lambda tenant, request: (tenant, request) == ("t", "r"))

    @staticmethod
    def beat(name: str) -> Any:
        role, _, contract = name.partition("-")
        return SimpleNamespace(
            role=Role(role), instance=name, contract="other" if contract == "other" else "c"
        )

    async def has(self, **says: bool | Exception | list[bool | Exception]) -> bool:
        """Ask; `says` has for each worker (by its number) what it says."""
        self.broker.says = {
            name.replace("_", "-"): said if isinstance(said, list) else [said]
            for name, said in says.items()
        }
        return await self.elsewhere.has(JOB)


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(module, "PAUSE_S", 0)
    return Case()


async def test_the_workers_of_the_pool_are_asked_and_nobody_else(case: Case) -> None:
    case.there += ["decode-2", "decode-other", "prefill-1"]
    assert await case.has(decode_1=False, decode_2=True)
    assert sorted(case.broker.asked) == ["decode-1", "decode-2"]
    assert not await case.has(decode_1=False, decode_2=False)


async def test_nobody_there_has_it_not(case: Case) -> None:
    case.there = ["decode-0"]
    assert not await case.has()


@pytest.mark.parametrize("error", [BrokerError("no answer in time"), NoWorkerError("nobody")])
async def test_who_is_stopped_or_gone_has_it_not(case: Case, error: Exception) -> None:
    assert not await case.has(decode_1=error)


@pytest.mark.parametrize("error", [BrokerError("no answer in time"), NoWorkerError("not yet")])
async def test_who_is_on_its_way_back_is_waited_for(case: Case, error: Exception) -> None:
    case.broker.back_at = time.time()
    assert await case.has(decode_1=[error, error, True])


async def test_who_comes_meanwhile_is_asked(case: Case) -> None:
    case.broker.back_at = time.time()
    case.there = ["decode-0"]
    asking = asyncio.create_task(case.has(decode_1=True))
    await asyncio.sleep(0)
    case.there.append("decode-1")
    async with asyncio.timeout(60):
        assert await asking


async def test_a_broker_that_is_lost_meanwhile_means_that_nobody_knows(case: Case) -> None:
    lost = BrokerError("the connection is lost")
    case.broker.on_request = lambda: setattr(case.broker, "num_losses", 1)
    with pytest.raises(BrokerError, match="nobody could say"):
        await case.has(decode_1=lost)


async def test_who_has_answered_is_not_asked_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEET_S", 0.0)
    case.broker.back_at = time.time()
    case.there.append("decode-2")
    await case.has(decode_1=[NoWorkerError("not yet"), False], decode_2=False)
    assert sorted(case.broker.asked) == ["decode-1", "decode-1", "decode-2"]


async def test_who_does_not_come_back_in_time_is_gone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_GRACE_S", 0.05)
    case.broker.back_at = time.time()
    assert not await case.has(decode_1=NoWorkerError("never"))


async def test_who_fell_silent_while_the_broker_was_away_is_asked(case: Case) -> None:
    case.elsewhere.look()
    case.there = ["decode-0"]
    case.broker.is_connected = False
    case.elsewhere.look()
    case.broker.is_connected, case.broker.back_at = True, time.time()
    case.elsewhere.look()
    assert await case.has(decode_1=True)


async def test_who_is_gone_for_long_is_not(case: Case) -> None:
    case.elsewhere.look()
    case.there = ["decode-0"]
    case.elsewhere.look()
    assert not await case.has()
    assert not case.broker.asked


@pytest.mark.parametrize(("request_id", "is_owner"), [("r", True), ("other", False)])
async def test_a_worker_answers_what_it_has(case: Case, request_id: str, is_owner: bool) -> None:
    await case.elsewhere.start()
    assert case.broker.handler is not None
    question = AskOwner(request_id=request_id, tenant="t")
    case.broker.handler(Received("s", wire.encode(question), {}, reply="inbox"))
    async with asyncio.timeout(60):
        await case.broker.responded.wait()
    assert wire.decode(case.broker.responses[0], Owner).is_owner is is_owner
