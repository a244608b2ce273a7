"""Frames: one message a step and worker, within the credits, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest

from headrace.decode import frames
from headrace.decode.frames import FrameLink
from headrace.decode.stream_log import StreamLog
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import DecodeOutput
from headrace.shared import token_ids
from headrace.shared.messages import Frame, StreamEnd

WATCHDOG_S = 20.0


class Source:
    """A stream that is fed by the test."""

    def __init__(self, stream_id: int) -> None:
        self.log = StreamLog(stream_id)
        self.end: StreamEnd | None = None
        self.lost_by: list[str] = []

    def lost(self, derender_instance: str) -> None:
        self.lost_by.append(derender_instance)


class Wire:
    """A link whose frames the test reads; the clock stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 0.0
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.link = FrameLink("decode-1", "derender-1", self.frames.put, now=lambda: self.time)
        self.task = asyncio.create_task(self.link.run())

    def add(self, source: Source, *token_ids: int) -> None:
        source.log.add(0, DecodeOutput(token_ids=list(token_ids)))
        self.link.notify(source.log.stream_id)

    async def next(self) -> Frame:
        async with asyncio.timeout(WATCHDOG_S):
            return await self.frames.get()


@pytest.fixture
async def wire():  # type: ignore[no-untyped-def]
    wire = Wire()
    yield wire
    wire.task.cancel()


async def test_a_step_of_many_streams_is_one_frame(wire: Wire) -> None:
    sources = [Source(i) for i in range(50)]
    for source in sources:
        wire.link.attach(source)
        wire.add(source, source.log.stream_id)
    frame = await wire.next()
    assert [entry.stream_id for entry in frame.tokens] == list(range(50))
    assert frame.seq == 1
    assert wire.frames.empty()


async def test_a_stream_that_has_nothing_yet_sends_nothing(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.frames.empty()
    wire.add(source, 7)
    assert len((await wire.next()).tokens) == 1


async def test_without_credit_token_ids_wait_and_then_travel_together(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    for seq in range(1, frames.WINDOW + 1):
        wire.add(source, seq)
        assert (await wire.next()).seq == seq
    for _ in range(10):
        wire.add(source, 7)
    wire.link.credit(0)
    assert wire.frames.empty()
    wire.link.credit(frames.WINDOW)
    (entry,) = (await wire.next()).tokens
    assert token_ids.unpack(entry.token_ids) == [7] * 10


async def step(wire: Wire, sources: list[Source], token_id: int) -> None:
    """Give each stream a token ID, and the sender its turn."""
    for source in sources:
        wire.add(source, token_id)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_worker_that_lags_gets_several_steps_of_a_stream_as_one_entry(wire: Wire) -> None:
    sources = [Source(i) for i in range(frames.WINDOW_ENTRIES)]
    for source in sources:
        wire.link.attach(source)
    for token_id in range(5):
        await step(wire, sources, token_id)
    assert [(await wire.next()).seq for _ in range(2)] == [1, 2]
    assert wire.frames.empty()
    wire.link.credit(1)
    third = await wire.next()
    assert [token_ids.unpack(entry.token_ids) for entry in third.tokens] == [[2, 3, 4]] * len(
        sources
    )
    await step(wire, sources, 5)
    assert wire.frames.empty()


async def test_a_worker_that_asks_again_is_not_waited_for_to_acknowledge_what_it_lost(
    wire: Wire,
) -> None:
    sources = [Source(i) for i in range(frames.WINDOW_ENTRIES)]
    for source in sources:
        wire.link.attach(source)
    for token_id in range(3):
        await step(wire, sources, token_id)
    for _ in range(2):
        await wire.next()
    assert wire.frames.empty()
    wire.link.resync(7, 0)
    again = await wire.next()
    assert [entry.index for entry in again.tokens if entry.stream_id == 7] == [0, 1, 2]


async def test_a_credit_for_frames_that_were_never_sent_is_ignored(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    wire.add(source, 1)
    await wire.next()
    wire.link.credit(99)
    wire.time = frames.STALL_S + 1
    assert wire.link.is_stalled


async def test_resync_sends_again_from_the_entry_that_was_named(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    for token_id in range(3):
        wire.add(source, token_id)
        await wire.next()
    wire.link.resync(1, 1)
    assert [entry.index for entry in (await wire.next()).tokens] == [1, 2]
    wire.link.resync(1, 99)
    wire.add(source, 3)
    assert [entry.index for entry in (await wire.next()).tokens] == [3]


async def test_the_end_comes_after_the_last_entry_and_again_when_asked(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    source.log.add(0, DecodeOutput(token_ids=[1], finish_reason="stop"))
    source.end = StreamEnd(stream_id=1, num_entries=1)
    wire.link.send_end(1)
    frame = await wire.next()
    assert (len(frame.tokens), frame.ends) == (1, (source.end,))
    wire.link.send_end(1)
    assert (await wire.next()).ends == (source.end,)


async def test_a_large_backlog_is_cut_into_frames(wire: Wire) -> None:
    source = Source(1)
    step = list(range(frames.MAX_FRAME_BYTES // 4))
    for _ in range(2):
        source.log.add(0, DecodeOutput(token_ids=step))
    source.end = StreamEnd(stream_id=1, num_entries=2)
    wire.link.attach(source)
    first, second = await wire.next(), await wire.next()
    assert [len(first.tokens), len(second.tokens)] == [1, 1]
    assert (first.ends, second.ends) == ((), (source.end,))


async def test_a_prompts_logprobs_count_as_part_of_a_frame(wire: Wire) -> None:
    table = expected_prompt_logprobs([1] * 600, -1)
    assert table is not None
    assert len(table.token_ids) + len(table.logprobs) > frames.MAX_FRAME_BYTES
    sources = [Source(1), Source(2)]
    for source in sources:
        source.log.add(0, DecodeOutput(token_ids=[1], prompt_logprobs=table))
        wire.link.attach(source)
    for source in sources:
        frame = await wire.next()
        assert [entry.stream_id for entry in frame.tokens] == [source.log.stream_id]


async def test_a_worker_that_acknowledges_nothing_is_given_up(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    wire.add(source, 1)
    await wire.next()
    wire.time = frames.STALL_S
    assert not wire.link.is_stalled
    wire.time = frames.STALL_S + 0.1
    assert wire.link.is_stalled
    wire.link.fail()
    assert source.lost_by == ["derender-1"]


async def test_an_idle_link_is_not_given_up(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    wire.add(source, 1)
    await wire.next()
    wire.link.credit(1)
    wire.time = 1_000.0
    assert not wire.link.is_stalled
    wire.add(source, 2)
    await wire.next()
    assert not wire.link.is_stalled


async def test_an_overdue_acknowledgement_is_asked_for(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    await wire.link.probe()
    assert wire.frames.empty()
    wire.add(source, 1)
    await wire.next()
    wire.time = frames.PROBE_S + 0.1
    await wire.link.probe()
    frame = await wire.next()
    assert (frame.seq, frame.tokens, frame.ends) == (2, (), ())


async def test_a_detached_stream_sends_nothing_more(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    wire.add(source, 1)
    wire.link.detach(1)
    other = Source(2)
    wire.link.attach(other)
    wire.add(other, 2)
    assert [entry.stream_id for entry in (await wire.next()).tokens] == [2]


async def test_a_word_about_a_detached_stream_is_ignored(wire: Wire) -> None:
    source = Source(1)
    wire.link.attach(source)
    await asyncio.sleep(0)
    wire.link.detach(1)
    wire.link.notify(1)
    wire.link.send_end(1)
    wire.link.resync(1, 0)
    other = Source(2)
    wire.link.attach(other)
    wire.add(other, 5)
    frames_seen = [await wire.next()]
    while not frames_seen[-1].tokens:
        frames_seen.append(await wire.next())
    assert [entry.stream_id for entry in frames_seen[-1].tokens] == [2]
    assert not wire.task.done()


async def test_a_link_that_follows_another_one_goes_on_counting() -> None:
    """Its receiver acknowledges by number: one that began anew would never be credited again."""
    frames_sent: asyncio.Queue[Frame] = asyncio.Queue()
    link = FrameLink("decode-1", "derender-1", frames_sent.put, now=lambda: 0.0, first_seq=41)
    task = asyncio.create_task(link.run())
    source = Source(1)
    source.log.add(0, DecodeOutput(token_ids=[1]))
    link.attach(source)
    assert (await frames_sent.get()).seq == 42
    assert link.seq == 42
    link.credit(42)
    task.cancel()
