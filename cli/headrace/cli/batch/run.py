"""`headrace batch run`: the requests of a file through a stack that runs, or one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.cli import up
from headrace.cli.batch.checkpoint import RUN_ID, Checkpoint
from headrace.cli.batch.lines import read
from headrace.cli.batch.progress import Counts, shown
from headrace.cli.batch.runner import Runner
from headrace.cli.batch.transfer import Transfer
from headrace.cli.logs import LogFormat, LogLevel
from headrace.client import Client
from headrace.shared.broker import CLIENT, Broker
from headrace.shared.contract import served_name
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.served_models import Models
from headrace.shared.settings import ModelSettings, Settings
from headrace.shared.workers import WorkerTable

#: with `--local`, unless the command line says otherwise: the gateway is there, and nobody needs it
LOCAL_PRESETS = {"gateway.port": "0", "gateway.api_keys_file": "", "gateway.api_keys": ""}
CONNECT_TIMEOUT_S = 10.0
INTERRUPTED = 130  # as a shell has it for a program that SIGINT ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What is to be run, and how."""

    input_file: Path
    output_file: Path
    tenant: str
    concurrency: int | None = None  #: None: by the slots of the decode workers
    retry_failed: bool = False
    run_id: str | None = None  #: None: that of the output file
    transfer: Transfer | None = None  #: None: both are files of this machine


def run(batch: Batch, settings: Settings) -> int:
    """Run a batch on a stack that runs already; return the exit code."""
    with opened(batch) as (checkpoint, num_bytes):
        session = Session(batch, checkpoint, num_bytes)
        code = asyncio.run(_until_signalled(session, settings))
    session.deliver()
    return code


def run_locally(
    batch: Batch, settings: Settings, log_format: LogFormat, log_level: LogLevel
) -> int:
    """Run a batch on a stack of its own; return the exit code."""
    with opened(batch) as (checkpoint, num_bytes):
        session = Session(batch, checkpoint, num_bytes)

        async def hold(url: str, resolved: Settings) -> None:
            await session.run(resolved)

        code = up.run_stack(
            settings, hold, store_dir=None, log_format=log_format, log_level=log_level
        )
    session.deliver()
    if session.code is None and not code:
        return INTERRUPTED  # before the stack was ready
    return code or session.code or 0


@contextmanager
def opened(batch: Batch) -> Iterator[tuple[Checkpoint, int]]:
    """Give the output, and the size of the input (0: unknown). Raises: SettingsError before anything is started."""
    if batch.run_id is not None and not RUN_ID.fullmatch(batch.run_id):
        raise SettingsError(f"--run-id must be 1 to 64 of A-Z a-z 0-9 _ -, got {batch.run_id!r}")
    try:
        found = os.stat(batch.input_file)
    except OSError as error:
        raise SettingsError(f"--input-file {batch.input_file}: {error.strerror}") from None
    with Checkpoint(batch.output_file, batch.run_id) as checkpoint:
        yield checkpoint, found.st_size if stat.S_ISREG(found.st_mode) else 0


async def _until_signalled(session: Session, settings: Settings) -> int:
    """Run it; the first SIGINT or SIGTERM cancels it, the second ends this process."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(session.run(settings))

    def stop() -> None:
        up.report("stopping; a second signal ends at once")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await asyncio.wait([work])
    if not work.cancelled():
        work.result()
    return INTERRUPTED if session.code is None else session.code


class Session:
    """One run of a batch, on a stack that is there."""

    def __init__(self, batch: Batch, checkpoint: Checkpoint, num_bytes: int) -> None:
        self._batch = batch
        self._checkpoint = checkpoint
        self._num_bytes = num_bytes
        self.code: int | None = None  #: for the shell. None: it has not begun

    async def run(self, settings: Settings) -> None:
        """Run every line that has no result yet; what is under way when this is cancelled is cancelled too.

        Raises: SettingsError, BrokerError, CheckpointError.
        """
        self.code = INTERRUPTED
        async with AsyncExitStack() as stack:
            table = await stack.enter_async_context(_workers(settings))
            client = await stack.enter_async_context(
                Client(settings.broker, tenant=self._batch.tenant)
            )
            models = Models(table)
            if not await models.listen():
                up.report(
                    f"heard of no worker at {settings.broker.shown_url}; requests wait for one"
                )
            counts = Counts(self._num_bytes)
            runner = Runner(
                client,
                self._checkpoint,
                models,
                counts,
                default_model=_default_model(settings) or models.only,
                retry_failed=self._batch.retry_failed,
            )
            try:
                async with shown(counts):
                    concurrency = self._batch.concurrency or models.concurrency
                    await runner.run(read(self._batch.input_file), concurrency)
                self.code = 1 if self._checkpoint.num_failed else 0
                self._report(counts)
            except asyncio.CancelledError:
                self._report(counts)
                up.report("not all lines were run: the same command again goes on")
                raise

    def deliver(self) -> None:
        """Send the output where it belongs, once every line has its result. Raises: TransferError."""
        transfer = self._batch.transfer
        if transfer is None or transfer.folder is None:
            return
        if self.code in (0, 1):
            transfer.deliver()
        else:
            up.report(f"what is done is kept in {transfer.folder}")

    def _report(self, counts: Counts) -> None:
        ok, failed = self._checkpoint.num_ok, self._checkpoint.num_failed
        up.report(
            f"{ok:,} ok and {failed:,} failed in {self._batch.output_file}; of these {counts.num_new:,} now, "
            f"in {counts.seconds:.1f} s: {counts.rates}"
        )
        if failed:
            up.report("--retry-failed runs the failed ones again")


@asynccontextmanager
async def _workers(settings: Settings) -> AsyncIterator[WorkerTable]:
    """Give the workers that this user may hear of. Raises: BrokerError."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            broker = await Broker.connect(settings.broker, role=CLIENT, name="batch")
    except TimeoutError:
        raise BrokerError(
            f"no broker at {settings.broker.shown_url} after {CONNECT_TIMEOUT_S:g} s: name that of a stack "
            "that runs with --nats-url, or start one with --local"
        ) from None
    try:
        async with WorkerTable(broker) as table:
            yield table
    finally:
        await broker.close()


def _default_model(settings: Settings) -> str | None:
    """Return the model that the settings name. None: they name none."""
    is_named = settings.model.served_name or settings.model.name != ModelSettings().name
    return served_name(settings) if is_named else None
