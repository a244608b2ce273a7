"""Setup after setup: what is sent to each, and what becomes of one that does not start."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli.bench.compare import sweep as sweeping
from headrace.cli.bench.compare.server import NotStartedError, running
from headrace.cli.bench.compare.setups import Setup
from headrace.cli.bench.compare.sweep import Plan, sweep
from headrace.cli.bench.measures import Measured
from headrace.cli.bench.prompts import Ask
from headrace.cli.bench.run import Load
from headrace.cli.process import Guard, group_exists

TIMEOUT_S = 60.0


def ask(name: str) -> Ask:
    return Ask(turns=(name,), num_output_token_ids=1)


class Groups(Guard):
    """Keeps the process groups that were started."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def add(self, group: int) -> None:
        self.seen.append(group)
        super().add(group)


@pytest.fixture
def guard() -> Iterator[Groups]:
    with Groups() as guard:
        yield guard


async def test_every_setup_is_sent_the_same_and_the_warm_up_once_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, float, list[str], list[str]]] = []

    async def send(url: str, load: Load) -> tuple[str, list[Measured]]:
        asked = [[one.turns[0] for one in some] for some in (load.warmup, load.asks)]
        sent.append((url, load.rate, *asked))
        return "m", [Measured(start=0.0, ttft_s=0.1, e2e_s=0.1) for _ in load.asks]

    @asynccontextmanager
    async def start(setup: Setup) -> AsyncIterator[str]:
        if setup.name == "broken":
            raise NotStartedError("it ended with code 1")
        yield f"http://{setup.name}"

    monkeypatch.setattr(sweeping, "send", send)
    plan = Plan(
        asks={1.0: [ask("a")], 2.0: [ask("b"), ask("c")]},
        warmup=[ask("w")],
        limits_ms={"ttft": 500.0},
        num_rounds=2,
    )
    setups = [
        Setup(name="none", title="none", cannot="no GPU"),
        *(Setup(name=name, title=name) for name in ("one", "broken", "two")),
    ]
    told: list[str] = []
    found = [done async for done in sweep(setups, plan, start, told.append)][-1]
    assert {one.name: (len(one.points), one.skipped) for one in found} == {
        "none": (0, "no GPU"),
        "one": (4, ""),
        "broken": (0, "it ended with code 1"),
        "two": (4, ""),
    }
    assert sent == [
        call
        for url in ("http://one", "http://two") * 2
        for call in ((url, 1.0, ["w"], ["a"]), (url, 2.0, [], ["b", "c"]))
    ]
    assert [line for line in told if line.startswith("broken")] == [
        "broken: starting",
        "broken: not measured: it ended with code 1",
    ]


async def test_a_server_that_ends_before_it_is_ready_is_told_with_its_last_words(
    tmp_path: Path, guard: Groups
) -> None:
    words = "import sys; print('no such model'); sys.exit(3)"
    setup = Setup(name="x", title="x", command=[sys.executable, "-c", words])
    with pytest.raises(NotStartedError, match=r"(?s)ended with code 3 .*no such model"):
        async with running(setup, tmp_path, TIMEOUT_S, guard):
            pytest.fail("it is not ready")


async def test_a_server_that_is_never_ready_is_ended(tmp_path: Path, guard: Groups) -> None:
    words = "import time; time.sleep(600)"
    setup = Setup(name="x", title="x", command=[sys.executable, "-c", words])
    with pytest.raises(NotStartedError, match=r"took over 0.1 s before it was ready"):
        async with running(setup, tmp_path, 0.1, guard):
            pytest.fail("it is not ready")
    (group,) = guard.seen
    assert not group_exists(group)
