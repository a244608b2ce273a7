from __future__ import annotations

import pytest

from headrace.engine.lease_book import MARGIN_S, LeaseBook

EXTENSION_S = 20.0


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook(EXTENSION_S, stalled_s=10.0)


def test_a_running_lease_may_be_read_and_an_ended_one_not(book: LeaseBook) -> None:
    assert book.may_read("d", "p", 30.0, now=29.0)
    assert not book.may_read("d", "p", 30.0, now=30.0 - MARGIN_S)
    assert not book.may_read("d", "p", 30.0, now=31.0)


def test_a_handoff_that_does_not_say_when_its_lease_ends_is_not_read(book: LeaseBook) -> None:
    assert not book.may_read("d", "p", None, now=0.0)


def test_a_read_that_ends_after_its_lease_is_late(book: LeaseBook) -> None:
    book.begin("d", 0.0)
    assert book.may_read("d", "p", 30.0, now=0.0)
    assert not book.is_late("d", 29.0)
    assert book.is_late("d", 30.0 - MARGIN_S)
    book.end("d")
    assert not book.is_late("d", 31.0)


def test_heartbeats_extend_a_lease_as_long_as_none_comes_too_late(book: LeaseBook) -> None:
    for now in (5.0, 24.0, 43.0):
        book.heartbeat(["p"], now)
    assert book.may_read("d", "p", 30.0, now=62.0)
    assert book.is_late("d", 63.0)


def test_a_heartbeat_after_the_leases_end_extends_nothing(book: LeaseBook) -> None:
    book.heartbeat(["p"], 31.0)
    assert not book.may_read("d", "p", 30.0, now=32.0)


def test_a_heartbeat_after_a_gap_extends_nothing(book: LeaseBook) -> None:
    book.heartbeat(["p"], 5.0)
    book.heartbeat(["p"], 26.0)  # prefill had the lease end at 30, or at 5 + 20
    assert not book.may_read("d", "p", 7.0, now=30.0)


def test_a_heartbeat_while_it_is_read_does_not_make_a_late_read_good(book: LeaseBook) -> None:
    assert book.may_read("d", "p", 30.0, now=0.0)
    book.heartbeat(["p"], 29.0)
    assert book.is_late("d", 30.0)


def test_what_is_no_longer_named_in_heartbeats_is_forgotten(book: LeaseBook) -> None:
    book.heartbeat(["p"], 5.0)
    book.heartbeat(["other"], 10.0)
    book.heartbeat(["p", "other"], 22.0)
    assert not book.may_read("d", "p", 21.0, now=23.0)


def test_a_read_that_takes_too_long_is_told_once(book: LeaseBook) -> None:
    book.begin("slow", 0.0)
    book.begin("quick", 0.0)
    book.end("quick")
    book.begin("young", 5.0)
    assert book.stalled(9.0) == []
    assert book.stalled(10.0) == ["slow"]
    assert book.stalled(11.0) == []
