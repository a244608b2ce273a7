"""`headrace up` with vLLM and NIXL on the demo model. One at a time, and one start for all who want the same."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from headrace.cli.demo import model as demo_model
from headrace.shared import settings as settings_module
from headrace.shared.broker import Broker
from headrace.shared.messages import Heartbeat
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

MODEL = "smollm2-135m-instruct"
MAX_QUEUED = 12
SETTINGS = {
    "model.dtype": "float32",  # the answer over NIXL is then token for token that of one engine
    "model.max_model_len": "4096",
    "decode.local_prefill_threshold": "0",
    "gateway.port": "0",
}
USUAL = {
    "model.tool_call_parser": "hermes",
    "model.enable_auto_tool_choice": "true",
    "broker.max_queued_per_subject": str(MAX_QUEUED),  # so that a test can fill it
}


@dataclass
class Stack:
    """A running `headrace up`."""

    process: subprocess.Popen[str]
    url: str
    run_dir: Path

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}{path}", timeout=30)
        answer.raise_for_status()
        return answer.json()

    async def until(self, predicate: Callable[[WorkerTable], bool]) -> None:
        """Return once the heartbeats of the stack's workers satisfy `predicate`."""
        async with self._table() as table:
            await table.wait_for(predicate)

    async def beat(self, role: Role) -> Heartbeat:
        """Return what the only worker of a role says of itself when it is asked."""
        async with self._table() as table:
            await table.wait_for(lambda table: len(table.ready(role)) == 1)
            return table.ready(role)[0]

    def heartbeat(self, role: str) -> dict[str, Any]:
        """Return what the only worker of a role last said of itself."""
        (worker,) = [w for w in self.get("/workers")["data"] if w["role"] == role]
        return dict(worker)

    @contextlib.asynccontextmanager
    async def _table(self) -> AsyncIterator[WorkerTable]:
        """Heartbeats that were sent because this table asked for them."""
        settings = settings_module.load(self.run_dir / "settings.json", {})
        broker = await Broker.connect(settings.broker, role="test", name="e2e")
        try:
            async with WorkerTable(broker) as table:
                yield table
        finally:
            await broker.close()


class Stacks:
    """One stack at a time: who wants the settings of the one that runs gets that one."""

    def __init__(self, home: Path) -> None:
        """`home` takes its files, and a link to the demo model."""
        self._home = home
        self._settings: dict[str, str] | None = None
        self._stack: Stack | None = None
        self._exit = contextlib.ExitStack()

    def get(self, **settings: str) -> Stack:
        """Return a stack with these settings, beside `SETTINGS`; another one is ended before it starts."""
        runs = self._stack is not None and self._stack.process.poll() is None
        if self._stack is None or not runs or settings != self._settings:
            self.close()
            self._link_model()
            self._stack = self._exit.enter_context(running_stack(self._home, **settings))
            self._settings = settings
        return self._stack

    def close(self) -> None:
        """End the one that runs, if there is one."""
        self._stack = None
        self._exit.close()

    def _link_model(self) -> None:
        model = demo_model.ensure(settings_module.home(), progress=lambda _: None)
        link = self._home / "models" / model.name
        if not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(model)


@contextlib.contextmanager
def running_stack(home: Path, **settings: str) -> Iterator[Stack]:
    """Start `headrace up`, wait for its ready line, and end it as Ctrl-C does."""
    sets = [f"--set={key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    command = [sys.executable, "-m", "headrace.cli.main", "up", *sets]
    log = home / "up.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "HEADRACE_HOME": str(home)},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready http://"), log.read_text()[-4000:]
        logs = re.search(r"^logs in (.+)/logs$", log.read_text(), re.MULTILINE)
        assert logs is not None
        yield Stack(process, line.split()[1], Path(logs[1]))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            code = process.wait(timeout=120)
            assert code in (0, -signal.SIGKILL), log.read_text()[-4000:]
        finally:
            process.stdout.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
