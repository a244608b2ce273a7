"""Three brokers that keep each stream three times."""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from headrace.shared.nats_server import NatsServer

from ...polling import eventually
from ...ports import free_port

NUM_SERVERS = 3


class Cluster:
    """Servers with routes between them; `url` names all of them."""

    def __init__(self, folder: Path) -> None:
        self._routes = [free_port() for _ in range(NUM_SERVERS)]
        self._monitors = [free_port() for _ in range(NUM_SERVERS)]
        self.servers = [
            NatsServer(folder / f"n{number}", config=self._config(folder, number))
            for number in range(NUM_SERVERS)
        ]

    @property
    def url(self) -> str:
        """As `broker.url` takes it."""
        return ",".join(server.url for server in self.servers)

    async def start(self) -> None:
        """Start all of them, and wait until they agree on a leader."""
        await asyncio.gather(*(server.start() for server in self.servers))
        async with httpx.AsyncClient(trust_env=False) as client:
            await eventually("they have a leader", lambda: self._has_leader(client))

    def kill(self) -> None:
        """End all of them."""
        for server in self.servers:
            server.kill()

    def server(self, name: str) -> NatsServer:
        """Return a server by the name that the broker's API calls it by."""
        return self.servers[int(name.removeprefix("n"))]

    async def _has_leader(self, client: httpx.AsyncClient) -> bool:
        seen: list[dict[str, Any]] = []
        for port in self._monitors:
            meta = (await client.get(f"http://127.0.0.1:{port}/jsz")).json().get("meta_cluster")
            seen.append(meta or {})
        sizes = {meta.get("cluster_size") for meta in seen}
        return sizes == {NUM_SERVERS} and all(meta.get("leader") for meta in seen)

    def _config(self, folder: Path, number: int) -> Path:
        routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in self._routes)
        store = json.dumps(str(folder / f"n{number}" / "jetstream"))
        path = folder / f"n{number}.conf"
        path.write_text(
            resources.files("headrace.shared").joinpath("nats_limits.conf").read_text()
            + f"""
server_name: n{number}
http: "127.0.0.1:{self._monitors[number]}"
jetstream {{ store_dir: {store}, max_memory_store: 2GB, max_file_store: 50GB }}
cluster {{ name: headrace, listen: "127.0.0.1:{self._routes[number]}", routes: [{routes}] }}
"""
        )
        return path
