"""Cancels: heard before or after the request, by tenant, and only by the request that they were meant for."""

from __future__ import annotations

import pytest

from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.cancels import Cancels
from headrace.shared.messages import Cancel


def heard(tenant: str, request_id: str, *, on: str | None = None) -> Received:
    cancel = Cancel(request_id=request_id, tenant=tenant, reason="gone")
    subject = on or subjects.cancel(tenant, request_id)
    return Received(subject, wire.encode(cancel), {}, "")


@pytest.fixture
def cancels() -> Cancels:
    return Cancels(now=lambda: 100.0)


def test_a_cancel_that_comes_before_its_request_is_remembered(cancels: Cancels) -> None:
    cancels._on_cancel(heard("acme", "r1"))
    assert cancels.reason("acme", "r1", accepted=99.0) == "gone"
    assert cancels.reason("acme", "r1", accepted=None) == "gone"
    assert cancels.reason("acme", "r2", accepted=99.0) is None


def test_a_cancel_of_an_earlier_request_of_the_same_id_is_not_this_ones(cancels: Cancels) -> None:
    cancels._on_cancel(heard("acme", "r1"))
    assert cancels.reason("acme", "r1", accepted=101.0) is None


def test_another_tenant_can_not_cancel(cancels: Cancels) -> None:
    calls: list[str] = []
    cancels.watch("acme", "r1", calls.append)
    cancels._on_cancel(heard("acme", "r1", on=subjects.cancel("evil", "r1")))
    cancels._on_cancel(heard("evil", "r1"))
    assert (calls, cancels.reason("acme", "r1", accepted=None)) == ([], None)


def test_whoever_runs_the_request_is_called_once(cancels: Cancels) -> None:
    calls: list[str] = []
    cancels.watch("acme", "r1", calls.append)
    cancels._on_cancel(heard("acme", "r1"))
    cancels._on_cancel(heard("acme", "r1"))
    assert calls == ["gone"]


def test_each_part_of_a_request_is_called_and_may_leave_alone(cancels: Cancels) -> None:
    calls: list[str] = []

    def one(reason: str) -> None:
        calls.append(f"one: {reason}")

    def two(reason: str) -> None:
        calls.append(f"two: {reason}")

    for part in (one, two, calls.append):
        cancels.watch("acme", "r1", part)
    cancels.unwatch("acme", "r1", calls.append)
    cancels._on_cancel(heard("acme", "r1"))
    assert calls == ["one: gone", "two: gone"]
    cancels.unwatch("acme", "r1", one)


def test_only_the_latest_are_remembered(cancels: Cancels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.shared.cancels._MAX_REMEMBERED", 2)
    for request_id in ("r1", "r2", "r3"):
        cancels._on_cancel(heard("acme", request_id))
    known = [cancels.reason("acme", r, accepted=None) for r in ("r1", "r2", "r3")]
    assert known == [None, "gone", "gone"]


def test_one_tenant_can_not_have_anothers_cancel_forgotten(
    cancels: Cancels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.shared.cancels._MAX_REMEMBERED", 4)
    cancels._on_cancel(heard("acme", "r1"))
    for number in range(9):
        cancels._on_cancel(heard("loud", f"r{number}"))
    assert cancels.reason("acme", "r1", accepted=None) == "gone"
    known = [cancels.reason("loud", f"r{number}", accepted=None) for number in range(9)]
    assert known == [None] * 6 + ["gone"] * 3
