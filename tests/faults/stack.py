"""The stack under fire: a real broker, and two processes of each stage."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from headrace.cli.process import Guard
from headrace.shared import settings as settings_module
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from ..ports import free_port
from .member import Member
from .proxy import Proxy

MODEL = "chaos"
ROLES = (Role.GATEWAY, Role.RENDER, Role.DECODE, Role.DERENDER, Role.PREFILL)  # as they end

PRESETS: dict[str, dict[str, Any]] = {
    "model": {"served_name": MODEL, "block_size": 16},
    "gateway": {"drain_timeout_s": 20},
    "decode": {
        "slots": 16,
        "local_prefill_threshold": 64,
        "handoff_margin_s": 2,
        "drain_timeout_s": 20,
    },
    "derender": {"drain_timeout_s": 20},
    "prefill": {"drain_timeout_s": 20},
    "nixl": {"lease_s": 10},
    "fake": {"step_s": 0.008, "prefill_s_per_1k": 0.05, "num_blocks": 1024, "max_model_len": 4096},
}


class FaultyBroker(NatsServer):
    """A broker that can also be paused for a while."""

    @property
    def port(self) -> int:
        """Where it listens, once it was started."""
        return int(self.url.rpartition(":")[2])

    def resume(self) -> None:
        """Let it run on after `pause`."""
        self._signal(signal.SIGCONT)


class Stack:
    """The broker, and two of each stage; of each, the second one sits behind a proxy."""

    def __init__(self, folder: Path, broker: FaultyBroker, members: list[Member]) -> None:
        self.folder = folder
        self.broker = broker
        self.members = members

    def of(self, role: Role) -> list[Member]:
        """Return the processes of a stage."""
        return [member for member in self.members if member.role is role]

    def sample(self) -> None:
        """Note what every process uses now."""
        for member in self.members:
            member.sample()


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *,
    each: int = 2,
    presets: dict[str, dict[str, Any]] | None = None,
    roles: Sequence[Role] = ROLES,
) -> AsyncIterator[Stack]:
    """Give a stack that is ready; end it in the order in which `headrace up` does."""
    broker = FaultyBroker(folder / "nats")
    await broker.start()
    proxies: list[Proxy] = []
    members: list[Member] = []
    try:
        with Guard() as guard:
            for role in roles:
                for index in range(each):
                    proxy = None
                    if index == 1:
                        proxy = Proxy(broker.port)
                        await proxy.start()
                        proxies.append(proxy)
                    url = proxy.url if proxy else broker.url
                    settings = _settings(url, presets or {})
                    member = Member(role, index, folder, settings, guard)
                    member.proxy = proxy
                    members.append(member)
                    member.start()
            await asyncio.gather(*(member.ready() for member in members))
            try:
                yield Stack(folder, broker, members)
            finally:
                for member in members:
                    member.signal(signal.SIGCONT)
                for role in roles:
                    await asyncio.gather(*(m.end() for m in members if m.role is role))
    finally:
        for proxy in proxies:
            await proxy.stop()
        broker.resume()
        await broker.stop()


def _settings(url: str, presets: dict[str, dict[str, Any]]) -> Settings:
    sections = {"broker", "gateway", *PRESETS, *presets}
    tables = {s: {**PRESETS.get(s, {}), **presets.get(s, {})} for s in sections}
    tables["broker"]["url"] = url
    tables["gateway"]["port"] = free_port()
    return settings_module.load(env={}, overrides=tables)
