"""Credits: few while a worker keeps up with a few streams, one a frame when there are many."""

from __future__ import annotations

from headrace.derender.control import CREDIT_ENTRIES, CREDIT_FRAMES, Credits
from headrace.shared.messages import Frame, Tokens


class Told:
    """Stands for `Control`: what decode workers were told."""

    def __init__(self) -> None:
        self.credits: list[tuple[str, int]] = []

    async def credit(self, decode: str, seq: int) -> None:
        self.credits.append((decode, seq))


def frame(seq: int, num_entries: int) -> Frame:
    entry = Tokens(stream_id=1, index=0, choice=0, token_ids=b"\1\0\0\0")
    return Frame(decode_instance="decode-1", seq=seq, tokens=(entry,) * num_entries)


async def test_small_frames_are_acknowledged_together() -> None:
    told = Told()
    credits = Credits(told)  # type: ignore[arg-type]  # it needs no more of it
    for seq in range(1, CREDIT_FRAMES + 1):
        assert told.credits == []
        await credits.worked_off(frame(seq, 1))
    assert told.credits == [("decode-1", CREDIT_FRAMES)]


async def test_a_large_frame_is_acknowledged_at_once() -> None:
    told = Told()
    credits = Credits(told)  # type: ignore[arg-type]  # it needs no more of it
    await credits.worked_off(frame(1, CREDIT_ENTRIES - 1))
    assert told.credits == []
    await credits.worked_off(frame(2, 1))
    await credits.worked_off(frame(3, CREDIT_ENTRIES))
    assert told.credits == [("decode-1", 2), ("decode-1", 3)]
