"""Keeps the processes of a stack running, restarts the ones that die, and ends them in order.

A worker that keeps dying before its stage was ever ready ends the whole stack: something is wrong
that a restart won't mend. After that a dead worker is restarted for ever, with growing pauses.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from headrace.cli.process import Guard, Process, group_exists
from headrace.cli.worker import Backoff, StackError, Worker, ending, last_lines
from headrace.shared.workers import process_name

DRAIN_ORDER = ("gateway", "batch", "render", "decode", "derender", "prefill")
START_ORDER = (
    "prefill",
    "decode",
    "render",
    "derender",
    "batch",
    "gateway",
)  # the gateway waits for all others
MAX_EARLY_DEATHS = 2
SETTINGS_EXIT_CODE = 2
DRAINED_CODES = (0, -signal.SIGTERM)  # the latter: told to end before it had begun
ALWAYS_DRAINED = "gateway"  # it takes connections before any stage is ready, and ends quickly
DRAIN_GRACE_S = 10.0

Report = Callable[[str], None]
WaitReady = Callable[[str, int], Awaitable[None]]


class Supervisor:
    """Runs workers until `stop` is set.

    `wait_ready(role, num)` returns when `num` workers of a role take work.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        stop: asyncio.Event,
        wait_ready: WaitReady,
        guard: Guard,
        report: Report,
        new_backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._workers = workers
        self._stop = stop
        self._wait_ready = wait_ready
        self._guard = guard
        self._report = report
        self._new_backoff = new_backoff
        self._roles = [role for role in DRAIN_ORDER if any(w.role == role for w in workers)]
        self._begun_roles: set[str] = (
            set()
        )  # of which at least one worker was ready, and may hold work
        self._ready_roles: set[str] = set()
        self._idle: set[str] = set()  # the workers that were killed because they held no work
        self._running: dict[str, Process] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._draining = asyncio.Event()
        self._killed = False
        self._clean = True
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Start every worker at once: each waits for what it needs."""
        for worker in self._workers:
            task = asyncio.create_task(self._keep(worker), name=worker.name)
            task.add_done_callback(partial(self._left, worker))
            self._tasks[worker.name] = task

    async def wait_ready(self, timeout_s: float) -> bool:
        """Return True when every role is ready, each reported; False when `stop` came first.

        Raises: StackError when a worker keeps dying, or when `timeout_s` is over.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self.during(
                    asyncio.gather(*(self._role_ready(role) for role in self._roles))
                )
        except TimeoutError:
            late = [role for role in self._roles if role not in self._ready_roles]
            slowest = next(role for role in START_ORDER if role in late)
            worker = next(worker for worker in self._workers if worker.role == slowest)
            raise StackError(
                f"{', '.join(late)} not ready after {timeout_s:g} s (up.ready_timeout_s)",
                worker=worker.name,
                log_lines=last_lines(worker.log),
            ) from None

    async def during(self, work: Awaitable[object]) -> bool:
        """Return True when `work` is done; False, with `work` cancelled, when `stop` came first.

        Raises: StackError when the stack can't go on, and whatever `work` raises.
        """
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._stop.wait())
        first: list[asyncio.Future[Any]] = [task, stopped, self._failed]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if not task.done():
                return False
            await task
            return True
        finally:
            for ended in (task, stopped):
                ended.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def drain(self) -> bool:
        """End the workers, role by role; return whether all drained in time, without an error.

        Of a stage in which none was ever ready, nobody holds work: those are killed, all at once.
        """
        self._draining.set()
        for worker in self._workers:
            if worker.role not in self._begun_roles and worker.role != ALWAYS_DRAINED:
                self._idle.add(worker.name)
                if worker.name in self._running:
                    self._running[worker.name].kill()
        for role in self._roles:
            names = [worker.name for worker in self._workers if worker.role == role]
            await asyncio.gather(*(self._end(name) for name in names))
        return self._clean and not self._killed

    def processes(self) -> dict[str, str]:
        """Return the running processes by the name of their worker, as `Heartbeat.process` names them."""
        return {name: process_name(process.group) for name, process in self._running.items()}

    def kill_worker(self, name: str, reason: str) -> None:
        """Kill one worker, to be started again."""
        if name in self._running and not self._draining.is_set():
            self._report(f"{name} {reason}; killing it")
            self._running[name].kill()

    def kill(self) -> None:
        """Kill every process group now; a running `drain` then returns soon."""
        self._killed = True
        self._draining.set()
        for process in self._running.values():
            process.kill()

    async def _keep(self, worker: Worker) -> None:
        clock = asyncio.get_running_loop().time
        backoff = self._new_backoff()
        num_early_deaths = 0
        while not self._draining.is_set():
            started = clock()
            code = await self._run_once(worker)
            if code is None or self._draining.is_set():
                is_idle = worker.name in self._idle
                self._clean = self._clean and (is_idle or code in DRAINED_CODES)
                return
            if code == SETTINGS_EXIT_CODE and worker.role not in self._ready_roles:
                self._fail(worker, f"{worker.name} refused its settings", code)
                return
            if worker.role not in self._ready_roles:
                num_early_deaths += 1
                if num_early_deaths > MAX_EARLY_DEATHS:
                    times = f"{num_early_deaths} times before it was ready"
                    self._fail(worker, f"{worker.name} {ending(code)} {times}")
                    return
            pause = backoff.after(clock() - started)
            self._report(f"{worker.name} {ending(code)}; starting it again in {pause:g} s")
            await self._pause(pause)

    async def _run_once(self, worker: Worker) -> int | None:
        try:
            process = await Process.start(worker.command, worker.env, worker.log, self._guard)
        except (OSError, subprocess.SubprocessError) as error:
            self._fail(worker, f"{worker.name} could not be started: {error}")
            return None
        self._running[worker.name] = process
        if self._killed or worker.name in self._idle:
            process.kill()
        elif self._draining.is_set():
            process.terminate()
        code = await process.wait()
        del self._running[worker.name]
        if group_exists(process.group):
            self._report(
                f"{worker.name} left processes that can't be killed (group {process.group})"
            )
            self._clean = False
        return code

    def _left(self, worker: Worker, task: asyncio.Task[None]) -> None:
        """A worker that nobody keeps any more, for a reason that nobody foresaw, ends the stack."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(worker, f"{worker.name} is not kept any more: {error!r}")

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.wait_for(self._draining.wait(), pause_s)
        except TimeoutError:
            return

    async def _end(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is None:
            return
        if name in self._running:
            self._running[name].terminate()
        worker = next(worker for worker in self._workers if worker.name == name)
        timeout_s = worker.drain_timeout_s + DRAIN_GRACE_S
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            self._report(f"{name} did not drain in {timeout_s:g} s; killing it")
            self._clean = False
            if name in self._running:
                self._running[name].kill()
        await asyncio.wait([task])  # its error, if it had one, has been told

    async def _role_ready(self, role: str) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        await self._wait_ready(role, 1)
        self._begun_roles.add(role)
        await self._wait_ready(role, sum(worker.role == role for worker in self._workers))
        self._ready_roles.add(role)
        self._report(f"{role:<9} ready in {clock() - started:.1f} s")

    def _fail(self, worker: Worker, message: str, exit_code: int = 1) -> None:
        self._clean = False
        if not self._failed.done():
            error = StackError(
                message,
                worker=worker.name,
                log_lines=last_lines(worker.log),
                exit_code=exit_code,
            )
            self._failed.set_exception(error)
            self._failed.exception()  # seen: nobody may be waiting for it while draining
