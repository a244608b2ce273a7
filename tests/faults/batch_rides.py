"""How a batch is run under fire: by the batch service, over HTTP, or by `headrace batch run`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import httpx

from headrace.shared.subjects import Role

from .stack import Stack

AGAIN_S = 0.3
PATIENCE_S = 300.0  # for one call, through kills; only when all is lost


class Ride(Protocol):
    """One way to run a batch."""

    process: object | None  #: what is to be killed instead of the stack. None: nothing
    summary: str  #: what else is worth a line in the end

    async def start(self) -> None:
        """Begin."""
        ...

    async def progress(self) -> tuple[int, bool]:
        """Return how many lines are done, and whether it is over."""
        ...

    async def kill(self) -> None:
        """End `process`, and start it again."""
        ...

    async def finish(self) -> tuple[bytes, bytes]:
        """Return the answers and the errors."""
        ...


class ServiceRide:
    """`/v1/files` and `/v1/batches`, on whichever gateway lives."""

    process = None
    summary = ""

    def __init__(self, stack: Stack, source: Path) -> None:
        self._gateways = stack.of(Role.GATEWAY)
        self._source = source
        self._batch: dict[str, Any] = {}

    async def start(self) -> None:
        """Upload the file, and make the batch."""
        data = self._source.read_bytes()
        uploaded = await self._call(
            "POST",
            "/v1/files",
            files={"file": ("in.jsonl", data)},
            data={"purpose": "batch"},
        )
        self._batch = (
            await self._call(
                "POST",
                "/v1/batches",
                json={
                    "input_file_id": uploaded.json()["id"],
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                },
            )
        ).json()

    async def progress(self) -> tuple[int, bool]:
        """As the batch says."""
        self._batch = (await self._call("GET", f"/v1/batches/{self._batch['id']}")).json()
        counts = self._batch["request_counts"]
        is_over = self._batch["status"] in ("completed", "failed", "expired", "cancelled")
        return counts["completed"] + counts["failed"], is_over

    async def kill(self) -> None:
        """Nothing of its own is to be killed."""

    async def finish(self) -> tuple[bytes, bytes]:
        """Read both files."""
        self.summary = f"{self._batch['status']}, {self._batch['request_counts']}"
        return (
            await self._content(self._batch["output_file_id"]),
            await self._content(self._batch["error_file_id"]),
        )

    async def _content(self, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        return (await self._call("GET", f"/v1/files/{file_id}/content")).content

    async def _call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Ask one gateway after the other, until one answers."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for gateway in self._gateways:
                    with contextlib.suppress(httpx.TransportError):
                        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
                            response = await client.request(method, path, **more)
                        if response.status_code == httpx.codes.OK:
                            return response
                await asyncio.sleep(AGAIN_S)


class RunRide:
    """`headrace batch run`, started again each time."""

    summary = ""

    def __init__(self, stack: Stack, source: Path) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._source = source
        self._output = source.with_name("out.jsonl")
        self._log = (source.with_name("batch-run.log")).open("wb")
        self._command = [
            *(sys.executable, "-m", "headrace.cli.main", "batch", "run"),
            *("-i", str(source), "-o", str(self._output), "--nats-url", stack.broker.url),
        ]

    async def start(self) -> None:
        """Start the command."""
        self.process = await asyncio.create_subprocess_exec(
            *self._command, stdout=self._log, stderr=self._log, env=dict(os.environ)
        )

    async def progress(self) -> tuple[int, bool]:
        """As the output file says."""
        num_done = 0
        with contextlib.suppress(FileNotFoundError):
            num_done = self._output.read_bytes().count(b"\n")
        assert self.process is not None
        return num_done, self.process.returncode is not None

    async def kill(self) -> None:
        """Kill the command, and give it again."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.start()

    async def finish(self) -> tuple[bytes, bytes]:
        """Sort the lines of the one output file: those that are errors apart."""
        assert self.process is not None
        self.summary = f"exit code {self.process.returncode}"
        self._log.close()
        lines = self._output.read_bytes().splitlines(keepends=True)
        errors = [line for line in lines if json.loads(line)["error"]]
        answers = [line for line in lines if not json.loads(line)["error"]]
        return b"".join(answers), b"".join(errors)
