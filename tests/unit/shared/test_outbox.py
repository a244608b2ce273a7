"""What was published of answers lately is published again when the broker was away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from headrace.shared import outbox as module
from headrace.shared.broker import Received
from headrace.shared.errors import BrokerError
from headrace.shared.outbox import KEEP_S, Outbox


class Broker:
    """Notes what is published, and can be away."""

    def __init__(self) -> None:
        self.num_losses = 0
        self.lost_at = float("-inf")
        self.now = 100.0
        self.published: list[tuple[bytes, str | None]] = []
        self.is_away = False
        self._callbacks: list[Callable[[], Awaitable[None]]] = []

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._callbacks.append(callback)

    async def publish(self, subject: str, payload: bytes) -> None:
        await self._publish(payload, None)

    async def publish_durable(
        self, subject: str, payload: bytes, *, message_id: str, expect_last: int | None = None
    ) -> bool:
        await self._publish(payload, message_id)
        return True

    async def replay(self, subject: str) -> list[Received]:
        return []

    async def restart(self) -> None:
        self.lose()
        self.published.clear()
        await self.come_back()

    def lose(self) -> None:
        self.num_losses += 1
        self.lost_at = self.now

    async def come_back(self) -> None:
        for callback in self._callbacks:
            await callback()

    async def _publish(self, payload: bytes, message_id: str | None) -> None:
        if self.is_away:
            raise BrokerError("away")
        self.published.append((payload, message_id))


class Case:
    def __init__(self) -> None:
        self.broker = Broker()
        self.outbox = Outbox(self.broker, now=lambda: self.broker.now)  # type: ignore[arg-type]


@pytest.fixture
def case() -> Case:
    return Case()


async def test_all_of_the_last_seconds_comes_again_in_its_order_and_with_its_ids(
    case: Case,
) -> None:
    await case.outbox.publish("s", b"old")
    case.broker.now += KEEP_S + 0.1
    await case.outbox.publish("s", b"chunk")
    await case.outbox.publish_durable("s", b"end", message_id="id", expect_last=4)
    await case.broker.restart()
    assert case.broker.published == [(b"chunk", None), (b"end", "id")]


async def test_a_long_outage_makes_nothing_too_old(case: Case) -> None:
    await case.outbox.publish_durable("s", b"end", message_id="id")
    case.broker.lose()
    case.broker.now += 60
    await case.outbox.publish("s", b"first after it")  # before the callbacks have run
    case.broker.published.clear()
    await case.broker.come_back()
    assert case.broker.published == [(b"end", "id"), (b"first after it", None)]


async def test_what_could_not_be_published_again_comes_after_the_next_loss(case: Case) -> None:
    await case.outbox.publish("s", b"chunk")
    case.broker.is_away = True
    await case.broker.restart()
    case.broker.is_away = False
    case.broker.now += 60
    await case.outbox.publish("s", b"later")
    await case.broker.restart()
    assert case.broker.published == [(b"chunk", None), (b"later", None)]


async def test_what_was_sent_long_before_a_loss_does_not_come_again(case: Case) -> None:
    await case.outbox.publish("s", b"an hour ago")
    case.broker.now += 3600
    await case.broker.restart()
    assert case.broker.published == []


async def test_it_keeps_so_many_bytes_at_most(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_BYTES", 10)
    for payload in (b"aaaa", b"bbbb", b"cccc"):
        await case.outbox.publish("s", payload)
    await case.broker.restart()
    assert [payload for payload, _ in case.broker.published] == [b"bbbb", b"cccc"]
