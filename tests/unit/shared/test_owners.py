"""Which messages of an answer count, in whatever order they come."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.messages import Chunk, Takeover, Terminal
from headrace.shared.owners import Owners, announced, message_of


def chunk(epoch: int, seq: int) -> Chunk:
    return Chunk(request_id="r", seq=seq, chunks=(b"{}",), epoch=epoch)


def terminal(epoch: int, **more: Any) -> Terminal:
    fields: dict[str, Any] = {"seq": 1, "status": "ok", "http_status": 200, **more}
    return Terminal(request_id="r", epoch=epoch, **fields)


def takeover(epoch: int, seq: int) -> Takeover:
    return Takeover(request_id="r", tenant="t", epoch=epoch, seq=seq, decode_instance="decode-1")


@pytest.mark.parametrize("order", list(permutations([takeover(2, 3), takeover(3, 5)])))
def test_each_takeover_keeps_what_was_before_it_and_voids_the_rest(
    order: tuple[Takeover, ...],
) -> None:
    owners = Owners()
    for message in order:
        owners.take_over(message)
    counting = [
        (epoch, seq)
        for epoch in (1, 2, 3)
        for seq in range(7)
        if not owners.is_void(chunk(epoch, seq))
    ]
    assert counting == [
        *((1, seq) for seq in range(3)),
        *((2, seq) for seq in range(5)),
        *((3, seq) for seq in range(7)),
    ]


def test_an_older_owners_end_of_a_stream_is_void_be_it_good_or_bad() -> None:
    owners = Owners()
    assert not owners.is_void(terminal(1))
    owners.take_over(takeover(2, 9))
    assert owners.is_void(terminal(1))
    assert owners.is_void(terminal(1, status="error", http_status=500, body=b"{}"))
    assert not owners.is_void(terminal(2))


def test_a_whole_answer_and_an_end_of_no_owner_count_whoever_took_over() -> None:
    owners = Owners()
    owners.take_over(takeover(2, 0))
    assert not owners.is_void(terminal(1, body=b'{"id":1}'))
    assert not owners.is_void(terminal(0, status="error", http_status=500, body=b"{}"))


def test_an_owner_whose_takeover_was_missed_is_a_stranger_until_it_is_known() -> None:
    owners = Owners()
    first = chunk(1, 0)
    assert not owners.is_stranger(first)
    owners.heard(first)
    assert not owners.is_stranger(chunk(1, 1))
    assert owners.is_stranger(chunk(2, 1))
    assert owners.is_stranger(terminal(2))
    assert not owners.is_stranger(terminal(0, status="error"))
    owners.take_over(takeover(2, 1))
    assert not owners.is_stranger(chunk(2, 1))
    assert not owners.is_stranger(chunk(1, 0))


def test_a_takeover_between_two_known_owners_may_have_been_missed_too() -> None:
    owners = Owners()
    owners.heard(chunk(1, 0))
    owners.take_over(takeover(3, 5))
    assert not owners.is_stranger(chunk(3, 5))
    assert not owners.is_stranger(chunk(2, 4))  # the third owner has counted it


@pytest.mark.parametrize(("tenant", "counts"), [("t", True), ("evil", False)])
def test_a_takeover_counts_on_the_subjects_of_its_own_tenant_alone(
    tenant: str, counts: bool
) -> None:
    payload = wire.encode(takeover(2, 0))
    told = Received(subjects.takeover(tenant, "r"), payload, {}, "")
    stored = Received(subjects.out(tenant, "r"), payload, {}, "")
    assert (announced(told) is not None) is counts
    assert (message_of(stored) is not None) is counts
