"""The broker that `headrace up` starts, keeps running, and ends last."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headrace.cli.side_channel import DEFAULT_PORT
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings

CHECK_INTERVAL_S = 0.5
AGAIN_S = 5.0  # after a restart that failed


@asynccontextmanager
async def running(
    settings: BrokerSettings, store_dir: Path, report: Callable[[str], None]
) -> AsyncIterator[BrokerSettings]:
    """Give the settings with the address of a new broker; it is started again if it dies.

    It listens on the port of `broker.url` where that is free here: every command and client asks there unless told
    otherwise.
    Raises: SettingsError when another stack uses the store, BrokerError when it can't start.
    """
    with locked(store_dir):
        server = NatsServer(
            store_dir, port=_port_of(settings.url), user=settings.user, password=settings.password
        )
        await server.start()
        keeping = asyncio.create_task(_keep(server, report))
        try:
            yield msgspec.structs.replace(settings, url=server.url)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await server.stop()


def _port_of(url: str) -> int:
    """Return the port of a broker's address on this machine; 0 where another process has it, or the host is another."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:  # several addresses, or none
        return 0
    if host not in ("127.0.0.1", "localhost"):
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as nats-server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


@contextmanager
def locked(store_dir: Path) -> Iterator[None]:
    """Hold the store: two brokers on one would destroy it.

    Raises: SettingsError when another process holds it, or the folder can't be used.
    """
    try:
        store_dir.mkdir(parents=True, exist_ok=True)
        lock_file = (store_dir / ".lock").open("w")
    except OSError as error:
        raise SettingsError(f"up.store_dir {store_dir}: it can't be used: {error}") from None
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"another stack uses the broker's store {store_dir}: stop it, or set up.store_dir, "
                f"or join its broker with {_how_to_join(store_dir)}"
            ) from None
        yield


def _how_to_join(store_dir: Path) -> str:
    """Return the setting, with the address where nats-server wrote it down."""
    try:
        (file,) = (store_dir / "ports").glob("*.ports")
        return f"up.nats_url={json.loads(file.read_text())['nats'][0]}"
    except (OSError, ValueError, LookupError, TypeError):  # it is about to start, or to end
        return "up.nats_url"


async def _keep(server: NatsServer, report: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        if not server.is_running:
            report("broker died; starting it again")
            try:
                await server.restart()
            except (BrokerError, OSError) as error:  # a full disk, say: somebody may make room
                report(f"{error}; trying again in {AGAIN_S:g} s")
                await asyncio.sleep(AGAIN_S)
