"""`headrace up`: a broker, a gateway and the stages, as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from headrace.cli import gpus, model, own_broker, plan, readiness, silence
from headrace.cli.logs import LogFormat, LogLevel
from headrace.cli.process import Guard, adopt_orphans
from headrace.cli.supervisor import Supervisor
from headrace.cli.worker import StackError, Worker
from headrace.shared import contract
from headrace.shared import settings as settings_module
from headrace.shared.settings import BrokerSettings, Settings

#: what to do with the ready stack at an address; when it returns, the stack is drained
Session = Callable[[str, Settings], Awaitable[object]]


def up(settings: Settings, log_format: LogFormat, log_level: LogLevel) -> int:
    """Run a stack until SIGINT or SIGTERM; return the exit code."""
    store_dir = Path(settings.up.store_dir or settings_module.home() / "nats")
    return run_stack(
        settings, _until_stopped, store_dir=store_dir, log_format=log_format, log_level=log_level
    )


def run_stack(
    settings: Settings,
    session: Session,
    *,
    store_dir: Path | None,
    log_format: LogFormat,
    log_level: LogLevel,
) -> int:
    """Start a stack, hold `session` with it, drain it; return the exit code.

    `store_dir` is the broker's; None: one for this run only.
    Raises: SettingsError before anything is started; HeadraceError when the stack can't run.
    """
    needs_files = settings.up.engine == "vllm"
    if needs_files:
        contract.check_vllm()
    settings = plan.with_port(settings)
    settings = model.resolve(settings, needs_files=needs_files, progress=report)
    visible_gpus = gpus.visible() if needs_files else []
    folder = plan.make_run_folder(settings_module.home())
    report(f"logs in {folder / 'logs'}")

    def workers(connected: Settings) -> list[Worker]:
        planned = plan.workers(
            connected,
            plan.write_settings(connected, folder),
            env=os.environ,
            visible_gpus=visible_gpus,
            log_format=log_format,
            log_level=log_level,
        )
        if port := connected.metrics.port:
            last = port + len(planned) - 1
            report(f"metrics at http://{connected.metrics.host}:{port}/metrics, up to port {last}")
        engines = [worker.env for worker in planned if worker.role in plan.ENGINE_ROLES]
        if shared := gpus.shared(engines if visible_gpus else []):
            report(
                f"engines share GPU {', '.join(shared)}: each needs a smaller "
                "gpu_memory_utilization (--engine-arg gpu_memory_utilization=0.4)"
            )
        return planned

    adopt_orphans()
    with Guard() as guard:
        try:
            return asyncio.run(
                _run(settings, store_dir or folder / "nats", workers, session, guard)
            )
        finally:
            if store_dir is None:
                shutil.rmtree(folder / "nats" / "jetstream", ignore_errors=True)


async def _run(
    settings: Settings,
    store_dir: Path,
    workers: Callable[[Settings], list[Worker]],
    session: Session,
    guard: Guard,
) -> int:
    stop = asyncio.Event()
    signals = _Signals(stop)
    async with (
        broker(settings, store_dir) as connected,
        readiness.watch(connected, address(connected)) as known,
    ):
        supervisor = Supervisor(
            workers(connected), stop=stop, wait_ready=known.wait_ready, guard=guard, report=report
        )
        signals.supervisor = supervisor
        supervisor.start()
        watching = asyncio.create_task(
            silence.watch(supervisor, known.heard, silent_s=connected.up.silent_s)
        )
        code = 0
        try:
            if await supervisor.wait_ready(connected.up.ready_timeout_s):
                url = address(connected)
                sys.stdout.write(f"ready {url}\n")
                sys.stdout.flush()
                await supervisor.during(session(url, connected))
        except StackError as error:
            _report_failure(error)
            code = error.exit_code
        finally:
            watching.cancel()
            is_clean = await supervisor.drain()
    return code or (0 if is_clean else 1)


@asynccontextmanager
async def broker(settings: Settings, store_dir: Path) -> AsyncIterator[Settings]:
    """Give the settings with the address of a broker: the one they name, or one of our own."""
    if settings.up.nats_url:
        yield _with_broker(
            settings, msgspec.structs.replace(settings.broker, url=settings.up.nats_url)
        )
        return
    async with own_broker.running(settings.broker, store_dir, report) as running:
        report(f"broker {running.url}")
        yield _with_broker(settings, running)


def address(settings: Settings) -> str:
    """Return the gateway's URL as this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.gateway.host, settings.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.gateway.port}"


def report(line: str) -> None:
    """Tell the person at the terminal; stdout is for results."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class _Signals:
    """The first SIGINT, SIGTERM or SIGHUP drains the stack, the second kills it."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._num = 0
        self.supervisor: Supervisor | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        self._num += 1
        if self._num == 1:
            report("draining; a second signal kills at once")
            self._stop.set()
        elif self.supervisor is not None:
            report("killing")
            self.supervisor.kill()


async def _until_stopped(url: str, settings: Settings) -> None:
    await asyncio.Event().wait()  # `Supervisor.during` ends it


def _with_broker(settings: Settings, broker: BrokerSettings) -> Settings:
    return msgspec.structs.replace(settings, broker=broker)


def _report_failure(error: StackError) -> None:
    if error.log_lines:
        report(f"the last lines of {error.worker}:")
        for line in error.log_lines:
            report(f"  {line}")
    report(f"headrace: {error}")
