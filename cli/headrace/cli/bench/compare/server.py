"""One setup as a running server: started, waited for, and ended with everything it started."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from headrace.cli import plan
from headrace.cli.bench.compare.setups import Setup
from headrace.cli.process import Guard, Process
from headrace.cli.readiness import POLL_S, wait_http
from headrace.cli.worker import ending, last_lines
from headrace.shared.errors import HeadraceError
from headrace.shared.settings import Settings

END_TIMEOUT_S = 60.0
NUM_SHOWN = 5


class NotStartedError(HeadraceError):
    """A setup does not get ready; says why."""


@asynccontextmanager
async def running(
    setup: Setup, folder: Path, ready_timeout_s: float, guard: Guard
) -> AsyncIterator[str]:
    """Give the address of a setup that is ready; its log goes to `folder`.

    Raises: NotStartedError.
    """
    port = plan.listenable_port("127.0.0.1", 0)
    url, log = f"http://127.0.0.1:{port}", folder / f"{setup.name}.log"
    log.unlink(missing_ok=True)
    with TemporaryDirectory(prefix="headrace-bench-") as own:
        if setup.settings is None:
            command, env = [*setup.command, str(port)], dict(os.environ)
            ready: Coroutine[Any, Any, None] = wait_http(f"{url}/health")
        else:
            settings = _at(setup.settings, port, Path(own))
            file = plan.write_settings(settings, Path(own))
            command = [sys.executable, "-m", "headrace.cli.main", "up", "--config", str(file)]
            env = plan.worker_env(os.environ)
            ready = _all_workers(url, settings)
        waiting = asyncio.create_task(ready)
        process = await Process.start(command, env, log, guard)
        async with _ready(process, waiting, log, ready_timeout_s):
            yield url


@asynccontextmanager
async def _ready(
    process: Process, waiting: asyncio.Task[None], log: Path, ready_timeout_s: float
) -> AsyncIterator[None]:
    """Hold a process that has got ready, and end it. Raises: NotStartedError."""
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait(
            {ended, waiting}, timeout=ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not waiting.done():
            how = ending(ended.result()) if ended.done() else f"took over {ready_timeout_s:g} s"
            raise NotStartedError(
                "\n  ".join([f"it {how} before it was ready ({log}):", *last_lines(log, NUM_SHOWN)])
            )
        waiting.result()
        yield
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await _end(process, ended)


async def _end(process: Process, ended: asyncio.Task[int]) -> None:
    process.terminate()
    done, _ = await asyncio.wait({ended}, timeout=END_TIMEOUT_S)
    if not done:
        process.kill()
        await ended


def _at(settings: Settings, port: int, folder: Path) -> Settings:
    replace = msgspec.structs.replace
    return replace(
        settings,
        gateway=replace(settings.gateway, port=port),
        up=replace(settings.up, store_dir=str(folder / "nats")),
    )


async def _all_workers(url: str, settings: Settings) -> None:
    """Return when every worker of a stack is ready: with half of them it would be half as fast."""
    up = settings.up
    wanted = {"render": up.render, "prefill": up.prefill, "decode": up.decode}
    wanted["derender"] = up.derender
    async with httpx.AsyncClient(trust_env=False) as client:
        while not await _has(client, f"{url}/ready", wanted):  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(POLL_S)


async def _has(client: httpx.AsyncClient, url: str, wanted: dict[str, int]) -> bool:
    try:
        answer = await client.get(url)
    except httpx.TransportError:  # not listening yet
        return False
    if answer.status_code != httpx.codes.OK:
        return False
    models: dict[str, Any] = answer.json()["models"]
    return any(
        all(model["stages"].get(stage, 0) >= num for stage, num in wanted.items())
        for model in models.values()
    )
