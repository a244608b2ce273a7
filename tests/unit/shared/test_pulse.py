"""When a peer counts as lost: asked by hand, without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.shared.errors import BrokerError, HeadraceError, NoWorkerError
from headrace.shared.pulse import RECONNECT_GRACE_S, Pulse

GONE = NoWorkerError("nobody listens")
SILENT = BrokerError("no answer within 1 s")
THERE = None


class Peer:
    """Answers each ping as the script says; then hangs, and says that the script is over."""

    def __init__(self, *answers: HeadraceError | Callable[[], None] | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.over = asyncio.Event()

    async def __call__(self, instance: str) -> None:
        self.asked.append(instance)
        while self.answers and callable(self.answers[0]):
            self.answers.pop(0)()  # type: ignore[operator,misc]
        if not self.answers:
            self.over.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, HeadraceError):
            raise answer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def lost_after(peer: Peer) -> int | None:
    """Return how many pings it took until the peer was lost, or None when it never was."""
    lost = asyncio.Event()
    pulse = Pulse(peer, interval_s=0)
    pulse.watch("p", lost.set)
    waits = [asyncio.create_task(event.wait()) for event in (lost, peer.over)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    pulse.stop()
    for wait in waits:
        wait.cancel()
    return len(peer.asked) if lost.is_set() else None


@pytest.mark.parametrize(
    ("answers", "pings"),
    [
        ((GONE, GONE), 2),
        ((THERE, THERE, GONE, GONE), 4),
        ((GONE, THERE, GONE), None),
        ((GONE, SILENT, GONE), None),
        ((SILENT, SILENT, SILENT, SILENT), None),
    ],
    ids=["gone", "dies", "once only", "not in a row", "hangs"],
)
async def test_a_peer_is_lost_when_twice_in_a_row_nobody_is_there(
    answers: tuple[HeadraceError | None, ...], pings: int | None
) -> None:
    assert await lost_after(Peer(*answers)) == pings


async def test_nobody_is_lost_for_a_while_after_ones_own_reconnect() -> None:
    clock, lost = Clock(), asyncio.Event()

    def later() -> None:
        clock.now += RECONNECT_GRACE_S

    peer = Peer(GONE, GONE, GONE, later, GONE, THERE, GONE, GONE)
    pulse = Pulse(peer, interval_s=0, now=clock)
    await pulse.reconnected()
    pulse.watch("p", lost.set)
    await lost.wait()
    assert peer.answers == []
    assert len(peer.asked) == 7


async def test_watchers_share_the_pings_and_each_is_called_once() -> None:
    peer, told = Peer(THERE, GONE, GONE), asyncio.Queue[str]()
    pulse = Pulse(peer, on_lost=lambda p: told.put_nowait(f"table {p}"), interval_s=0)
    pulse.watch("p", lambda: told.put_nowait("one"))
    pulse.watch("p", lambda: told.put_nowait("two"))
    assert [await told.get() for _ in range(3)] == ["table p", "one", "two"]
    assert peer.asked == ["p"] * 3
    assert told.empty()


async def test_a_watch_that_ended_is_not_called_and_the_last_one_ends_the_pings() -> None:
    peer, told = Peer(GONE, GONE), asyncio.Queue[str]()
    pulse = Pulse(peer, interval_s=0)
    end_one = pulse.watch("p", lambda: told.put_nowait("one"))
    end_two = pulse.watch("p", lambda: told.put_nowait("two"))
    end_one()
    end_one()
    assert await told.get() == "two"
    end_two()  # after the loss: nothing
    pulse.watch("p", lambda: told.put_nowait("three"))()
    assert pulse._watched == {}
    assert told.empty()


async def test_a_peer_that_came_back_can_be_watched_and_lost_again() -> None:
    peer, told = Peer(GONE, GONE, THERE, GONE, GONE), asyncio.Queue[int]()
    pulse = Pulse(peer, interval_s=0)
    for number in (1, 2):
        pulse.watch("p", lambda number=number: told.put_nowait(number))  # type: ignore[misc]
        assert await told.get() == number
