"""One child process in a group of its own, so that it ends with everything it started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.cli import guard

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_TIMEOUT_S = 10.0
REAP_INTERVAL_S = 0.02

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Make this process the parent of what its children leave behind, to wait for it."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return what the child runs first, so that it never outlives the thread that forked it."""
    if _libc is None:
        return None
    prctl = _libc.prctl

    def before_program() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return before_program


class Guard:
    """The process of `guard.py`, told which groups there are."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def add(self, group: int) -> None:
        """Kill this group when the supervisor ends."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """This group has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and with it every group that was not removed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # somebody killed the guard; PR_SET_PDEATHSIG is left
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Process:
    """A running child. Its group's number is its process ID."""

    def __init__(self, child: asyncio.subprocess.Process, group_guard: Guard) -> None:
        self._child = child
        self._guard = group_guard
        self.group = child.pid

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], log: Path, group_guard: Guard
    ) -> Self:
        """Start `command`, its output appended to `log`.

        Must run in the main thread: the child ends with the *thread* that forked it.
        """
        with log.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        try:
            group_guard.add(child.pid)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)  # nobody would end it
            raise
        return cls(child, group_guard)

    async def wait(self) -> int:
        """Return the child's exit code (negative: the signal) once its whole group is gone.

        What the child leaves behind is killed: an engine on its own holds memory and a port.
        """
        code = await self._child.wait()
        self.kill()
        if await wait_for_group(self.group):
            self._guard.remove(self.group)
        return code

    def terminate(self) -> None:
        """Ask the child, not its children, to drain and end."""
        if self._child.returncode is None:
            self._child.terminate()

    def kill(self) -> None:
        """Kill the whole group."""
        kill_group(self.group)


def kill_group(group: int) -> None:
    """Send SIGKILL to a process group, if there is one."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (
        ProcessLookupError,
        PermissionError,
    ):  # macOS: PermissionError when only zombies are left
        return


async def wait_for_group(group: int, timeout_s: float = REAP_TIMEOUT_S) -> bool:
    """Reap a killed group; return False if something of it was still there after `timeout_s`.

    Its members became children of this process (`adopt_orphans`); no call waits for a whole group.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while group_exists(group):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(REAP_INTERVAL_S)
    return True


def group_exists(group: int) -> bool:
    """Reap what has ended of a process group; return whether anything is left of it."""
    try:
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:
        pass
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
