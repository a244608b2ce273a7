"""The server that comes with headrace."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from headrace.shared.nats_server import NatsServer

PARENT = """
import asyncio, sys
from pathlib import Path
from headrace.shared.nats_server import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]))
    await server.start()
    print(server._process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        readable, _, _ = select.select([server], [], [], 20)  # readable: the process has ended
    os.close(server)
    assert readable


async def test_it_keeps_its_port_over_a_restart_and_stops_twice_without_harm(
    tmp_path: Path,
) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    await server.start()
    url = server.url
    await server.restart()
    assert (server.url, server.is_running) == (url, True)
    await server.stop()
    await server.stop()
    assert not server.is_running
