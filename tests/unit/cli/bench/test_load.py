"""When `headrace bench` sends, and what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.cli.bench import load, prompts
from headrace.shared.errors import SettingsError


def test_the_same_seed_gives_the_same_times_at_about_the_rate() -> None:
    times = load.arrivals(2_000, 4.0, seed=1)
    assert times == load.arrivals(2_000, 4.0, seed=1) != load.arrivals(2_000, 4.0, seed=2)
    assert times == sorted(times)
    assert 2_000 / times[-1] == pytest.approx(4.0, rel=0.1)
    assert load.arrivals(3, float("inf"), seed=1) == [0.0, 0.0, 0.0]


async def test_a_closed_loop_keeps_so_many_under_way_and_no_more() -> None:
    running, most = 0, 0

    async def send(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return item * 2

    assert await load.closed_loop(range(10), 3, send) == [item * 2 for item in range(10)]
    assert most == 3


async def test_an_open_loop_waits_for_nobody() -> None:
    last = asyncio.Event()

    async def send(item: int) -> int:
        if item == 2:
            last.set()
        await last.wait()
        return item

    async with asyncio.timeout(30):
        assert await load.open_loop([0, 1, 2], [0.0, 0.0, 0.001], send) == [0, 1, 2]


def test_random_prompts_are_the_same_for_the_same_seed() -> None:
    def make(seed: int) -> list[prompts.Ask]:
        return prompts.random_asks(
            2, num_input=5, num_output=3, vocab_size=200, num_turns=2, seed=seed
        )

    assert make(1) == make(1) != make(2)
    assert [len(turn) for turn in make(1)[0].turns] == [5, 5]
    assert all(100 <= token_id < 200 for turn in make(1)[0].turns for token_id in turn)


def test_a_file_may_have_prompts_messages_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": [1, 2], "max_tokens": 5},
        {"messages": [{"role": "user", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    asks = prompts.read_asks(path, 4, 9)
    assert [ask.turns for ask in asks[:3]] == [([1, 2],), (lines[1]["messages"],), ("b",)]
    assert [ask.num_output_token_ids for ask in asks] == [5, 9, 9, 5]


def test_a_line_with_none_of_them_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "a"}')
    with pytest.raises(SettingsError, match=r"none of prompt, messages.*question"):
        prompts.read_asks(path, 1, 9)
