"""Results, held for a moment and then stored in parts."""

from __future__ import annotations

import asyncio

import pytest

from headrace.batch import checkpoint as checkpoints
from headrace.batch.checkpoint import Checkpoint
from headrace.batch.part_log import LINES
from headrace.batch.results import Outcome, of_code
from headrace.shared.batches import BatchCounts, BatchUsage

from ..memory_files import MemoryFiles

WITHIN_S = 60  # only when all is lost


@pytest.fixture
def store() -> MemoryFiles:
    return MemoryFiles()


def answer(num_bytes: int = 40) -> Outcome:
    return Outcome(
        data=b"x" * (num_bytes - 1) + b"\n", is_ok=True, usage=BatchUsage(input_tokens=2)
    )


async def stored(checkpoint: Checkpoint) -> None:
    """Store what is held."""
    checkpoint.close()
    async with asyncio.timeout(WITHIN_S):
        await checkpoint.run()


async def test_results_become_parts_of_whole_lines_and_a_long_one_a_part_of_its_own(
    store: MemoryFiles,
) -> None:
    checkpoint = Checkpoint(store, "t", "batch_1", 1)
    for line, num_bytes in enumerate((40, 40, 40, 300), start=1):
        checkpoint.add(line, answer(num_bytes))
    await stored(checkpoint)
    parts = store.files["file-1-output"]
    assert [part.headers[LINES] for part in parts] == ["1,2", "3", "4"]
    assert [len(part.data) for part in parts] == [80, 40, 300]


async def test_a_line_keeps_its_first_result(store: MemoryFiles) -> None:
    checkpoint = Checkpoint(store, "t", "batch_1", 1)
    checkpoint.add(1, answer())
    checkpoint.add(1, of_code("r", "a", "batch_expired"))
    await stored(checkpoint)
    assert checkpoint.counts(1) == BatchCounts(total=1, completed=1, failed=0)
    assert "file-1-error" not in store.files


async def test_a_later_owner_knows_what_is_stored_and_why_lines_were_not_run(
    store: MemoryFiles,
) -> None:
    first = Checkpoint(store, "t", "batch_1", 1)
    first.add(1, answer())
    first.add(2, of_code("r", "a", "batch_expired"))
    await stored(first)
    second = Checkpoint(store, "t", "batch_1", 2)
    await second.take_over()
    assert (second.has(1), second.has(2), second.has(3)) == (True, True, False)
    assert second.output.content.usage == BatchUsage(input_tokens=2)
    assert second.errors.content.swept == "batch_expired"


async def test_what_is_held_is_bounded_while_the_store_is_away(
    store: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(checkpoints, "HELD_S", 0.0)
    store.is_away = True
    checkpoint = Checkpoint(store, "t", "batch_1", 1)
    running = asyncio.create_task(checkpoint.run())
    for line in range(1, 5):
        checkpoint.add(line, answer())
    room = asyncio.create_task(checkpoint.room())
    async with asyncio.timeout(WITHIN_S):
        await store.asked.wait()
        assert not room.done()
        store.is_away = False
        await room
        checkpoint.close()
        await running
    assert checkpoint.counts(4).completed == 4
