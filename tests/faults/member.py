"""One process of the stack, over all its lives: started again as a supervisor would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.cli import plan
from headrace.cli.process import Guard, Process
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from ..polling import eventually
from .proxy import Proxy

RESTART_PAUSE_S = 0.5  # a supervisor's first pause
READY_TIMEOUT_S = 180.0  # only when all is lost
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Exit:
    """How one life of a process ended."""

    name: str
    code: int  #: negative: the signal
    wanted: bool  #: whether the harness had killed it or told it to end
    ended: float  #: Unix seconds
    life_s: float


@dataclass(slots=True)
class Life:
    """What one life of a process used, sampled while it lived."""

    name: str
    started: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)  #: time, RSS bytes, files


class Member:
    """One process of the stack, over all its lives."""

    def __init__(self, role: Role, index: int, folder: Path, settings: Settings, guard: Guard):
        self.role = role
        self.index = index
        self.name = f"{role}-{index}"
        self.settings = settings
        self.proxy: Proxy | None = None
        self.log = folder / f"{self.name}.log"
        self.exits: list[Exit] = []
        self.lives: list[Life] = []
        self.is_busy = False  #: a fault has it in hand
        (folder / self.name).mkdir()
        self._command = [
            *(sys.executable, "-m", "headrace.cli.main", "serve", role),
            *("--config", str(plan.write_settings(settings, folder / self.name))),
            *("--instance-index", str(index), "--engine", "fake", "--log-format", "json"),
        ]
        self._guard = guard
        self._process: Process | None = None
        self._wanted = False
        self._ending = False
        self._gone = asyncio.Event()  #: a life's process is no longer there
        self._keeping: asyncio.Task[None] | None = None
        self._log_from = 0

    @property
    def url(self) -> str:
        """Where a gateway listens."""
        return f"http://127.0.0.1:{self.settings.gateway.port}"

    @property
    def pid(self) -> int | None:
        """The process of this life."""
        return self._process.group if self._process else None

    def start(self) -> None:
        """Start it, and again whenever it ends."""
        self._keeping = asyncio.create_task(self._keep(), name=self.name)

    async def ready(self) -> None:
        """Return when this life's process takes work. Raises: TimeoutError."""
        await eventually(
            f"{self.name} is ready",
            lambda: self.instance() is not None,
            within_s=READY_TIMEOUT_S,
            poll_s=POLL_S,
        )

    def instance(self) -> str | None:
        """Return the name under which this life has said that it is ready."""
        if self._process is None or not self.log.exists():
            return None
        with self.log.open("rb") as log:
            log.seek(self._log_from)
            for line in log:
                if b'"worker_ready"' in line:
                    return str(msgspec.json.decode(line).get("worker", self.name))
        return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; one that ends it is remembered as wanted."""
        if self._process is None:
            return
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._wanted = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.group, number)

    async def end_life(self, number: signal.Signals) -> None:
        """Send a signal that ends this life, and return when its process is gone."""
        process = self._process
        self.signal(number)
        while process is not None and self._process is process:
            self._gone.clear()
            await self._gone.wait()

    def sample(self) -> None:
        """Note what the process uses now."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            self.lives[-1].samples.append((time.time(), pages * os.sysconf("SC_PAGE_SIZE"), files))

    async def end(self) -> None:
        """Let it drain, and not come back."""
        self._ending = True
        self.signal(signal.SIGTERM)
        if self._keeping is not None:
            timeout_s = plan.drain_timeout_s(self.settings, self.role) + 10
            done, _ = await asyncio.wait({self._keeping}, timeout=timeout_s)
            if not done:
                self.signal(signal.SIGKILL)
                await self._keeping

    async def _keep(self) -> None:
        while not self._ending:
            self._log_from = self.log.stat().st_size if self.log.exists() else 0
            self._wanted = False
            started = time.time()
            self.lives.append(Life(self.name, started))
            process = await Process.start(
                self._command, plan.worker_env(os.environ), self.log, self._guard
            )
            self._process = process
            code = await process.wait()
            self._process = None
            self._gone.set()
            now = time.time()
            self.exits.append(Exit(self.name, code, self._wanted, now, now - started))
            if not self._ending:
                await asyncio.sleep(RESTART_PAUSE_S)
