"""The fake engine's NIXL: prefill serves its blocks on a local TCP port, decode engines pull them.

One connection a handoff, one JSON object a line. While it is open, the lease does not run out.

    decode → prefill   {"engine_id", "request_id"}          I am going to pull this
    decode → prefill   {"op": "pull", "block_ids": [...]}   or {"op": "release"}
    prefill → decode   {"content": hex}                     or {} after a release, or {"error"}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Self

from headrace.engine.fake_blocks import BlockPool, Leases
from headrace.engine.fake_faults import FaultPlan


class PullFailedError(Exception):
    """The prefill engine is gone, is another one, or broke off."""


class PullServer:
    """The prefill side."""

    def __init__(self, engine_id: str, pool: BlockPool, leases: Leases, faults: FaultPlan) -> None:
        self._engine_id = engine_id
        self._pool = pool
        self._leases = leases
        self._faults = faults
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._resumed = asyncio.Event()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._serve, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def resume(self) -> None:
        """Answer the pulls that hang, as a stopped process does that goes on."""
        self._faults.hang_pulls = False
        self._resumed.set()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        request_id = ""
        try:
            hello = await _read(reader)
            request_id = hello["request_id"]
            foreign = hello["engine_id"] != self._engine_id
            if not foreign:
                self._leases.hold(request_id, writer)
            ask = await _read(reader)
            await self._answer(ask, request_id, foreign, writer)
        except (PullFailedError, ConnectionError, asyncio.CancelledError):
            pass  # the other side, or this engine, is gone: nobody is left to tell
        finally:
            self._leases.unhold(request_id, writer)
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, ask: dict[str, Any], request_id: str, foreign: bool, writer: asyncio.StreamWriter
    ) -> None:
        if self._faults.drop_pulls:
            writer.transport.abort()
            return
        if self._faults.hang_pulls:
            self._resumed.clear()
            await self._resumed.wait()
        if foreign:
            answer = {"error": f"this is engine {self._engine_id}"}
        elif ask["op"] == "release":
            answer = {}
        else:
            answer = {"content": self._pool.read(ask["block_ids"]).hex()}
        if not foreign:
            self._leases.end(request_id)
        writer.write(_line(answer))
        await writer.drain()


class Pull:
    """The decode side of one handoff: open while the request is in the engine."""

    def __init__(self, kv_transfer_params: Mapping[str, Any]) -> None:
        self._kv = kv_transfer_params
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asked = False

    async def __aenter__(self) -> Self:
        """Connect. A prefill engine that is gone shows in `pull`, as it does in vLLM."""
        try:
            self._reader, self._writer = await asyncio.open_connection(
                self._kv["remote_host"], self._kv["remote_port"]
            )
            self._send(
                engine_id=self._kv["remote_engine_id"], request_id=self._kv["remote_request_id"]
            )
        except OSError:
            self._writer = None
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._writer is not None:
            if not self._asked:
                self._send(op="release")  # aborted before its pull: vLLM gives the blocks back, too
            self._writer.close()

    async def pull(self) -> bytes:
        """Return what the handoff's blocks hold.

        Raises: PullFailedError.
        """
        blocks = [block for group in self._kv["remote_block_ids"] for block in group]
        answer = await self._ask(op="pull", block_ids=blocks)
        return bytes.fromhex(answer["content"])

    async def release(self) -> None:
        """Let the prefill engine free the blocks.

        Raises: PullFailedError.
        """
        await self._ask(op="release")

    async def _ask(self, **ask: Any) -> dict[str, Any]:
        if self._reader is None or self._writer is None:
            raise PullFailedError("no connection")
        try:
            self._asked = True
            self._send(**ask)
            await self._writer.drain()
            answer = await _read(self._reader)
        except ConnectionError as error:
            raise PullFailedError(str(error)) from None
        if "error" in answer:
            raise PullFailedError(answer["error"])
        return answer

    def _send(self, **message: Any) -> None:
        assert self._writer is not None
        self._writer.write(_line(message))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise PullFailedError("the connection ended")
    message: dict[str, Any] = json.loads(line)
    return message
