"""The supervisor with real processes: small scripts stand in for the stages.

A stand-in reports over a named pipe, so that the tests wait for what happens, not for time to pass.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.process import Guard, Process, adopt_orphans, group_exists
from headrace.cli.supervisor import Supervisor, WaitReady
from headrace.cli.worker import Backoff, StackError, Worker

TIMEOUT_S = 30.0

REPORT = """
import os, signal, subprocess, sys, threading
name, pipe = sys.argv[1:3]
def tell(what):
    with open(pipe, "a") as out:
        out.write(f"{name} {what}\\n")
"""
SERVE = (
    REPORT
    + """
def drain(*_):
    tell("drained")
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
tell(f"up {os.getpid()}")
signal.pause()
"""
)
STUBBORN = (
    REPORT
    + """
signal.signal(signal.SIGTERM, lambda *_: tell("told"))
tell(f"up {os.getpid()}")
while True:
    signal.pause()
"""
)
WITH_CHILD = (
    REPORT
    + """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
tell(f"up {child.pid}")
signal.pause()
"""
)
DIE = "import sys; print('loading'); print('no such model: ' + sys.argv[1]); sys.exit(7)"
REFUSE = "import sys; sys.exit(2)"


class Reports:
    """What the stand-ins say, line by line."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = ""

    async def next(self) -> tuple[str, str]:
        """Return the next report: who, and what."""
        loop = asyncio.get_running_loop()
        while "\n" not in self._rest:
            readable = asyncio.Event()
            loop.add_reader(self._fd, readable.set)
            try:
                await asyncio.wait_for(readable.wait(), TIMEOUT_S)
            finally:
                loop.remove_reader(self._fd)
            self._rest += os.read(self._fd, 65536).decode()
        line, _, self._rest = self._rest.partition("\n")
        name, _, what = line.partition(" ")
        return name, what

    def close(self) -> None:
        os.close(self._fd)


class Stack:
    """A supervisor of stand-ins whose readiness the test decides."""

    def __init__(self, folder: Path, reports: Reports, guard: Guard) -> None:
        self.folder = folder
        self.reports = reports
        self.guard = guard
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def worker(self, role: str, script: str = SERVE, drain_timeout_s: float = TIMEOUT_S) -> Worker:
        return Worker(
            role=role,
            index=0,
            command=[sys.executable, "-c", script, f"{role}-0", str(self.reports.path)],
            env=dict(os.environ),
            log=self.folder / f"{role}-0.log",
            drain_timeout_s=drain_timeout_s,
        )

    def supervisor(self, *workers: Worker, wait_ready: WaitReady | None = None) -> Supervisor:
        async def wait_until_ready(role: str, num: int) -> None:
            await self.ready.wait()

        return Supervisor(
            workers,
            stop=self.stop,
            wait_ready=wait_ready or wait_until_ready,
            guard=self.guard,
            report=self.lines.put_nowait,
            new_backoff=lambda: Backoff(first_s=0.01, last_s=0.02),
        )


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    reports = Reports(tmp_path / "reports")
    yield reports
    reports.close()


@pytest.fixture
def guard() -> Iterator[Guard]:
    adopt_orphans()
    with Guard() as guard:
        yield guard


@pytest.fixture
def stack(tmp_path: Path, reports: Reports, guard: Guard) -> Stack:
    return Stack(tmp_path, reports, guard)


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that need not be a child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
        return bool(readable)
    finally:
        os.close(descriptor)


def test_a_worker_that_was_killed_is_started_again(stack: Stack) -> None:
    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("decode"))
        supervisor.start()
        stack.ready.set()
        assert await supervisor.wait_ready(TIMEOUT_S)
        _, first = await stack.reports.next()
        os.kill(int(first.split()[1]), signal.SIGKILL)
        name, second = await stack.reports.next()
        assert name == "decode-0"
        assert second.startswith("up ")
        assert second != first
        stack.stop.set()
        assert await supervisor.drain()

    asyncio.run(scenario())


def test_a_restart_is_reported_with_its_reason_and_its_pause(stack: Stack) -> None:
    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("decode"))
        supervisor.start()
        stack.ready.set()
        assert await supervisor.wait_ready(TIMEOUT_S)
        assert (await stack.lines.get()).startswith("decode    ready in ")
        _, up = await stack.reports.next()
        os.kill(int(up.split()[1]), signal.SIGKILL)
        line = await asyncio.wait_for(stack.lines.get(), TIMEOUT_S)
        assert line == "decode-0 was killed by signal 9; starting it again in 0.01 s"
        await supervisor.drain()

    asyncio.run(scenario())


def test_a_third_death_before_ready_ends_the_stack_with_the_last_log_lines(stack: Stack) -> None:
    async def scenario() -> StackError:
        supervisor = stack.supervisor(stack.worker("render"), stack.worker("prefill", DIE))
        supervisor.start()
        with pytest.raises(StackError) as caught:
            await supervisor.wait_ready(TIMEOUT_S)
        assert not await supervisor.drain()
        return caught.value

    error = asyncio.run(scenario())
    assert str(error) == "prefill-0 ended with code 7 3 times before it was ready"
    assert error.worker == "prefill-0"
    assert error.log_lines == ["loading", "no such model: prefill-0"] * 3


def test_deaths_after_ready_do_not_end_the_stack(stack: Stack) -> None:
    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("decode"))
        supervisor.start()
        stack.ready.set()
        assert await supervisor.wait_ready(TIMEOUT_S)
        for _ in range(4):
            _, up = await stack.reports.next()
            os.kill(int(up.split()[1]), signal.SIGKILL)
        _, up = await stack.reports.next()
        assert up.startswith("up ")
        stack.stop.set()
        assert not await supervisor.during(asyncio.Event().wait())
        assert await supervisor.drain()

    asyncio.run(scenario())


def test_a_worker_that_refuses_its_settings_is_not_started_again(stack: Stack) -> None:
    async def scenario() -> StackError:
        supervisor = stack.supervisor(stack.worker("decode", REFUSE))
        supervisor.start()
        with pytest.raises(StackError) as caught:
            await supervisor.wait_ready(TIMEOUT_S)
        await supervisor.drain()
        return caught.value

    error = asyncio.run(scenario())
    assert str(error) == "decode-0 refused its settings"
    assert error.exit_code == 2


def test_a_stack_that_is_not_ready_in_time_names_the_stage_and_the_setting(stack: Stack) -> None:
    async def scenario() -> StackError:
        supervisor = stack.supervisor(stack.worker("render"))
        supervisor.start()
        await stack.reports.next()
        with pytest.raises(StackError) as caught:
            await supervisor.wait_ready(0.01)
        assert await supervisor.drain()
        return caught.value

    error = asyncio.run(scenario())
    assert str(error) == "render not ready after 0.01 s (up.ready_timeout_s)"


def test_stages_drain_one_after_the_other_gateway_first_prefill_last(stack: Stack) -> None:
    roles = ["prefill", "derender", "decode", "render", "gateway"]

    async def scenario() -> list[str]:
        supervisor = stack.supervisor(*(stack.worker(role) for role in roles))
        supervisor.start()
        for _ in roles:
            await stack.reports.next()
        stack.ready.set()
        assert await supervisor.wait_ready(TIMEOUT_S)
        assert await supervisor.drain()
        reports = [await stack.reports.next() for _ in roles]
        assert {what for _, what in reports} == {"drained"}
        return [name for name, _ in reports]

    assert asyncio.run(scenario()) == [
        "gateway-0",
        "render-0",
        "decode-0",
        "derender-0",
        "prefill-0",
    ]


def test_kill_ends_a_drain_that_a_worker_holds_up(stack: Stack) -> None:
    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("gateway", STUBBORN), stack.worker("decode"))
        supervisor.start()
        pids = [int((await stack.reports.next())[1].split()[1]) for _ in range(2)]
        stack.ready.set()
        assert await supervisor.wait_ready(TIMEOUT_S)
        drain = asyncio.create_task(supervisor.drain())
        assert await stack.reports.next() == ("gateway-0", "told")
        supervisor.kill()
        assert not await asyncio.wait_for(drain, TIMEOUT_S)
        assert not any(group_exists(pid) for pid in pids)

    asyncio.run(scenario())


def test_a_worker_that_does_not_drain_in_time_is_killed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.supervisor.DRAIN_GRACE_S", 0.0)

    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("gateway", STUBBORN, drain_timeout_s=0.01))
        supervisor.start()
        await stack.reports.next()
        assert not await supervisor.drain()
        assert await stack.lines.get() == "gateway-0 did not drain in 0.01 s; killing it"

    asyncio.run(scenario())


def test_a_worker_that_is_not_ready_yet_is_killed_at_once(stack: Stack) -> None:
    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("gateway"), stack.worker("prefill", STUBBORN))
        supervisor.start()
        pids = dict([await stack.reports.next(), await stack.reports.next()])
        assert await asyncio.wait_for(supervisor.drain(), TIMEOUT_S)
        assert await stack.reports.next() == ("gateway-0", "drained")
        assert not group_exists(int(pids["prefill-0"].split()[1]))

    asyncio.run(scenario())


def test_a_worker_that_is_just_being_started_is_killed_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    born, told = asyncio.Event(), asyncio.Event()
    start = Process.start

    async def start_late(*arguments: Any) -> Process:
        process = await start(*arguments)
        born.set()
        await told.wait()
        return process

    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("prefill", "import signal; signal.pause()"))
        supervisor.start()
        await born.wait()
        drain = asyncio.create_task(supervisor.drain())
        asyncio.get_running_loop().call_soon(told.set)  # after the first step of `drain`
        assert await asyncio.wait_for(drain, TIMEOUT_S)

    monkeypatch.setattr(Process, "start", start_late)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its children ignore it from the start
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stage_of_which_one_worker_is_ready_drains(stack: Stack) -> None:
    async def scenario() -> None:
        one_ready = asyncio.Event()

        async def wait_ready(role: str, num: int) -> None:
            if num > 1:
                one_ready.set()
                await stack.ready.wait()

        workers = [replace(stack.worker("decode"), index=index) for index in range(2)]
        supervisor = stack.supervisor(*workers, wait_ready=wait_ready)
        supervisor.start()
        waiting = asyncio.create_task(supervisor.wait_ready(TIMEOUT_S))
        await asyncio.wait_for(one_ready.wait(), TIMEOUT_S)
        for _ in workers:
            await stack.reports.next()
        stack.stop.set()
        assert not await waiting
        assert await supervisor.drain()
        assert [(await stack.reports.next())[1] for _ in workers] == ["drained", "drained"]

    asyncio.run(scenario())


def test_what_a_worker_leaves_behind_is_killed_before_it_is_started_again(stack: Stack) -> None:
    async def scenario() -> None:
        supervisor = stack.supervisor(stack.worker("prefill", WITH_CHILD))
        supervisor.start()
        stack.ready.set()
        assert await supervisor.wait_ready(TIMEOUT_S)
        _, up = await stack.reports.next()
        left_behind = int(up.split()[1])
        os.kill(os.getpgid(left_behind), signal.SIGKILL)  # only the leader, whose ID is the group's
        await stack.reports.next()
        assert has_ended(left_behind)
        assert await supervisor.drain()

    asyncio.run(scenario())


HOST = """
import asyncio, os, signal, sys
from pathlib import Path
from headrace.cli.process import Guard, adopt_orphans
from headrace.cli.supervisor import Supervisor
from headrace.cli.worker import Worker

scripts, pipe, folder, guarded = sys.argv[1:]

async def run(guard):
    workers = [
        Worker(role=role, index=0, command=[sys.executable, "-c", script, f"{role}-0", pipe],
               env=dict(os.environ), log=Path(folder) / f"{role}.log", drain_timeout_s=30)
        for role, script in eval(scripts).items()
    ]
    supervisor = Supervisor(
        workers, stop=asyncio.Event(), wait_ready=None, guard=guard, report=print
    )
    supervisor.start()
    await asyncio.Event().wait()

adopt_orphans()
with Guard() as guard:
    if guarded == "no":
        os.kill(guard.pid, signal.SIGKILL)
    asyncio.run(run(guard))
"""


@pytest.mark.parametrize(
    ("guarded", "scripts"),
    [("yes", {"decode": SERVE, "prefill": WITH_CHILD}), ("no", {"decode": SERVE, "render": SERVE})],
    ids=["with its guard, the workers' own children included", "without its guard, the workers"],
)
def test_nothing_outlives_a_supervisor_that_was_killed(
    tmp_path: Path, reports: Reports, guarded: str, scripts: dict[str, str]
) -> None:
    async def scenario() -> None:
        host = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOST),
            *(repr(scripts), str(reports.path), str(tmp_path), guarded),
        )
        pids = [int((await reports.next())[1].split()[1]) for _ in scripts]
        workers = [os.getpgid(pid) for pid in pids]
        host.kill()
        await host.wait()
        assert all(has_ended(pid) for pid in {*pids, *workers})

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (subprocess.SubprocessError("Exception occurred in preexec_fn."), "could not be started"),
        (ValueError("embedded null byte"), "is not kept any more"),
    ],
)
async def test_a_worker_that_can_not_be_started_ends_the_stack_and_the_others_drain(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    start = Process.start.__func__  # type: ignore[attr-defined]

    async def failing(
        cls: type[Process], command: list[str], env: Any, log: Path, guard: Guard
    ) -> Process:
        if log.name.startswith("decode"):
            raise error
        process: Process = await start(cls, command, env, log, guard)
        return process

    monkeypatch.setattr(Process, "start", classmethod(failing))
    supervisor = stack.supervisor(stack.worker("render"), stack.worker("decode"))
    supervisor.start()
    assert (await stack.reports.next())[0] == "render-0"
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StackError, match=f"decode-0 {message}"):
            await supervisor.wait_ready(TIMEOUT_S)
        assert not await supervisor.drain()
    assert not supervisor.processes()
