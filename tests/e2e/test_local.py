"""The real stack where decode prefills itself: the same answers, and nothing left when it is killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import pytest

from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from ..real_stack import Stack, Stacks
from .conftest import complete

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

KILL_DEADLINE_MS = 10_000


@pytest.fixture(scope="module")
def stack(stacks: Stacks) -> Stack:
    return stacks.get(**{"decode.local_prefill_threshold": "inf"})


def test_greedy_answers_of_a_local_prefill_are_those_of_one_engine(
    stack: Stack, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert [complete(stack, prompt) for prompt in prompts] == expected

    def has_prefilled_all(table: WorkerTable) -> bool:
        return all(d.num_prefilled == len(prompts) for d in table.ready(Role.DECODE))

    asyncio.run(stack.until(has_prefilled_all))
    assert stack.heartbeat("decode")["num_external_cached_token_ids"] == 0


def descendants(ancestor: int) -> dict[int, str]:
    """Return the processes that descend from one: number and command line."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
            except OSError:
                continue
    found: dict[int, str] = {}
    generation = {ancestor}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation}
        found |= {child: commands[child] for child in generation}
    return found


def test_a_killed_supervisor_leaves_no_process(stack: Stack) -> None:
    """The last test of this stack."""
    left = descendants(stack.process.pid)
    engines = [command for command in left.values() if "EngineCore" in command]
    assert len(engines) == 2, left
    waits = select.poll()
    ends = {os.pidfd_open(number): number for number in left}
    for end in ends:
        waits.register(end, select.POLLIN)
    stack.process.send_signal(signal.SIGKILL)
    while ends:
        ended = waits.poll(KILL_DEADLINE_MS)
        assert ended, f"still alive: {[left[number] for number in ends.values()]}"
        for end, _ in ended:
            waits.unregister(end)
            os.close(end)
            del ends[end]
