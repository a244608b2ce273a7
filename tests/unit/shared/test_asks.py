"""Questions beside a worker's main work: so many at once, so many waiting, each answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.shared import wire
from headrace.shared.asks import AskDesk, answering
from headrace.shared.broker import Received
from headrace.shared.errors import BadRequestError, BrokerError
from headrace.shared.messages import Ask, AskAnswer
from headrace.shared.subjects import Role

NOW = 1_800_000_000.0
SUBJECT = "hr.v1.render.ask.m"


class Subscription:
    def __init__(self) -> None:
        self.is_ended = False

    async def unsubscribe(self) -> None:
        self.is_ended = True


@dataclass
class FakeBroker:
    answers: dict[str, AskAnswer] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    subscription: Subscription = field(default_factory=Subscription)
    queue: str = ""
    handler: Callable[[Received], None] | None = None
    refuse: Exception | None = None

    async def subscribe(self, subject: str, handler: Any, *, queue: str) -> Subscription:
        assert subject == SUBJECT
        self.handler, self.queue = handler, queue
        return self.subscription

    async def respond(self, received: Received, payload: bytes) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.answers[received.reply] = wire.decode(payload, AskAnswer)
        self.changed.set()

    async def until(self, num_answers: int) -> None:
        while len(self.answers) < num_answers:
            self.changed.clear()
            await self.changed.wait()


class Holding:
    """Holds each question until it is let go."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.changed = asyncio.Event()
        self._let_go = asyncio.Event()

    async def __call__(self, ask: Ask) -> bytes:
        self.started.append(ask.request_id)
        self.changed.set()
        await self._let_go.wait()
        return ask.request_id.encode()

    async def until_started(self, number: int) -> None:
        while len(self.started) < number:
            self.changed.clear()
            await self.changed.wait()

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


def desk(broker: FakeBroker, answerer: Callable[[Ask], Awaitable[bytes]], **limits: int) -> AskDesk:
    worker: Any = SimpleNamespace(broker=broker, instance="render-1", role=Role.RENDER)
    return AskDesk(worker, answerer, now=lambda: NOW, **limits)


def question(request_id: str, deadline: float = NOW + 1) -> Received:
    ask = Ask(request_id=request_id, tenant="t", endpoint="tokenize", deadline=deadline, body=b"{}")
    return Received(SUBJECT, wire.encode(ask), {}, request_id)


async def test_so_many_are_answered_at_once_and_so_many_wait(broker: FakeBroker) -> None:
    answerer = Holding()
    asked = desk(broker, answerer, slots=2, max_waiting=1)
    for name in "abcd":
        asked.receive(question(name))
    await broker.until(1)
    refused = broker.answers["d"]
    assert (refused.http_status, refused.retry_after_s) == (429, 1.0)
    assert b"render-1 has 3 questions" in refused.body
    await answerer.until_started(2)
    assert answerer.started == ["a", "b"]
    answerer.let_go()
    await asked.finish()
    assert {name: broker.answers[name].body for name in "abc"} == {"a": b"a", "b": b"b", "c": b"c"}
    asked.receive(question("e"))
    await asked.finish()
    assert broker.answers["e"] == AskAnswer(http_status=200, body=b"e")


async def test_nobody_works_on_a_question_past_its_deadline(broker: FakeBroker) -> None:
    answerer = Holding()
    asked = desk(broker, answerer)
    asked.receive(question("late", NOW - 1))
    await asked.finish()
    assert broker.answers["late"].http_status == 504
    assert answerer.started == []


@pytest.mark.parametrize(
    ("error", "http_status", "told"),
    [
        (BadRequestError("the prompt is empty", param="prompt"), 400, "the prompt is empty"),
        (ZeroDivisionError("inside"), 500, "Internal server error"),
    ],
)
async def test_an_error_is_answered_in_openais_body(
    broker: FakeBroker, error: Exception, http_status: int, told: str
) -> None:
    async def fail(ask: Ask) -> bytes:
        raise error

    asked = desk(broker, fail)
    asked.receive(question("a"))
    await asked.finish()
    answer = broker.answers["a"]
    found = msgspec.json.decode(answer.body)["error"]
    assert (answer.http_status, found["code"], found["message"]) == (http_status, http_status, told)


async def test_an_unreadable_question_is_answered_with_the_reason(broker: FakeBroker) -> None:
    asked = desk(broker, Holding())
    asked.receive(Received(SUBJECT, b"junk", {}, "a"))
    await asked.finish()
    assert broker.answers["a"].http_status == 400
    assert b"expected ask.v1" in broker.answers["a"].body


async def test_an_answer_that_cannot_be_sent_is_logged_and_ends_nothing_else(
    broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    answerer = Holding()
    answerer.let_go()
    asked = desk(broker, answerer)
    broker.refuse = BrokerError("away")
    asked.receive(question("a"))
    await asked.finish()
    assert "answer_lost" in [getattr(record, "action", "") for record in caplog.records]
    broker.refuse = None
    asked.receive(question("b"))
    await asked.finish()
    assert list(broker.answers) == ["b"]


async def test_stop_ends_the_subscription_and_what_was_taken_is_answered(
    broker: FakeBroker,
) -> None:
    worker: Any = SimpleNamespace(broker=broker, instance="render-1", role=Role.RENDER)
    answerer, stop = Holding(), asyncio.Event()
    async with answering(worker, SUBJECT, answerer, stop):
        assert broker.queue == "render"
        assert broker.handler is not None
        broker.handler(question("a", deadline=2 * NOW))
        await answerer.until_started(1)
        stop.set()
        answerer.let_go()
        await broker.until(1)
    assert broker.subscription.is_ended
    assert broker.answers["a"].http_status == 200


async def test_the_end_of_the_block_ends_it_too(broker: FakeBroker) -> None:
    worker: Any = SimpleNamespace(broker=broker, instance="render-1", role=Role.RENDER)
    answerer = Holding()
    answerer.let_go()
    async with answering(worker, SUBJECT, answerer, asyncio.Event()):
        assert broker.handler is not None
        broker.handler(question("a", deadline=2 * NOW))
    assert broker.subscription.is_ended
    assert broker.answers["a"].http_status == 200
