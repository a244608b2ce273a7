"""What the next owner of a job reads of its answer."""

from __future__ import annotations

from headrace.decode.takeover import seen
from headrace.shared import wire
from headrace.shared.broker import Received
from headrace.shared.messages import Chunk, Takeover
from headrace.shared.wire import Message


def stored(sequence: int, message: Message | None) -> Received:
    payload = b"" if message is None else wire.encode(message)
    return Received("out", payload, {"Nats-Sequence": str(sequence)}, "")


def chunk(seq: int, epoch: int) -> Chunk:
    return Chunk(request_id="r", seq=seq, chunks=(b"{}",), epoch=epoch)


def test_of_an_older_owner_what_came_before_the_takeover_counts() -> None:
    takeover = Takeover(request_id="r", tenant="t", epoch=2, seq=1, decode_instance="decode-2")
    told = [chunk(0, 1), chunk(1, 1), takeover, chunk(1, 2)]
    found = seen(stored(number, message) for number, message in enumerate(told, 5))
    assert found.chunks == (chunk(0, 1), chunk(1, 2))
    assert (found.epoch, found.last) == (2, 8)


def test_a_message_that_cannot_be_read_is_missing_and_ends_no_worker() -> None:
    found = seen([stored(1, chunk(0, 1)), stored(2, None), stored(3, chunk(2, 1)), stored(4, None)])
    assert [chunk.seq for chunk in found.chunks] == [0, 2]
    assert found.last == 4
