"""The real stack while its engines are killed or stand still: each answer is the right one, or a clean error."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import openai
import pytest

from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

from ..real_stack import Stack, Stacks
from .conftest import complete

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

CHOSEN = slice(7, 15)  # prompts of 89 to 300 token IDs, all prefilled remotely
SETTINGS = {
    "nixl.lease_s": "10",
    "decode.handoff_margin_s": "2",
    "decode.pull_timeout_s": "2",
    "decode.prefill_timeout_s": "5",
}
RIGHT, CLEAN_ERROR, WRONG = "right", "clean error", "wrong"


@pytest.fixture(scope="module")
def stack(stacks: Stacks) -> Stack:
    return stacks.get(**SETTINGS)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def outcome(stack: Stack, prompt: list[int], expected: list[int]) -> str:
    """Ask once; a status of 500 or above in OpenAI's form is a clean error."""
    try:
        return RIGHT if complete(stack, prompt) == expected else WRONG
    except openai.APIStatusError as error:
        return CLEAN_ERROR if error.status_code >= 500 else WRONG
    except openai.APIConnectionError:
        return WRONG


def group_of(stack: Stack, role: str) -> int:
    """Return the process group of a worker and its engine."""
    return int(stack.heartbeat(role)["process"].rpartition(":")[2])


def wait_for_first(asked: list[Future[str]]) -> None:
    wait(asked, return_when=FIRST_COMPLETED)


def ready_again(stack: Stack, role: Role, epoch: str) -> None:
    """Wait until the role's worker is ready with another engine than `epoch`."""

    def is_there(table: WorkerTable) -> bool:
        return any(w.epoch != epoch for w in table.ready(role))

    asyncio.run(stack.until(is_there))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_answers_stay_right_when_an_engine_is_killed_under_load_and_when_it_is_back(
    stack: Stack,
    pool: ThreadPoolExecutor,
    prompts: list[list[int]],
    expected: list[list[int]],
    role: str,
) -> None:
    pairs = list(zip(prompts[CHOSEN], expected[CHOSEN], strict=True))
    group, epoch = group_of(stack, role), stack.heartbeat(role)["epoch"]
    asked = [pool.submit(outcome, stack, *pair) for pair in pairs]
    wait_for_first(asked)
    os.killpg(group, signal.SIGKILL)
    assert {one.result() for one in asked} <= {RIGHT, CLEAN_ERROR}
    ready_again(stack, Role(role), epoch)
    assert [outcome(stack, *pair) for pair in pairs] == [RIGHT] * len(pairs)


def test_answers_stay_right_when_prefill_stands_still_under_load_and_when_it_goes_on(
    stack: Stack,
    pool: ThreadPoolExecutor,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    pairs = list(zip(prompts[CHOSEN], expected[CHOSEN], strict=True))
    group = group_of(stack, "prefill")
    asked = [pool.submit(outcome, stack, *pair) for pair in pairs]
    wait_for_first(asked)
    os.killpg(group, signal.SIGSTOP)
    try:
        assert {one.result() for one in asked} <= {RIGHT, CLEAN_ERROR}
    finally:
        os.killpg(group, signal.SIGCONT)
    assert [outcome(stack, *pair) for pair in pairs] == [RIGHT] * len(pairs)
