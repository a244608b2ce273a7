"""`headrace log-level ROLE LEVEL`: how much the running processes of a role write."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from headrace.cli.operator_link import connected
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker
from headrace.shared.messages import LevelName, LogLevel
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Role
from headrace.shared.workers import WorkerTable

ALL = "all"
HEAR_S = 1.0
"""For the roll call's answers."""


def run(role: str, level: LevelName, settings: BrokerSettings) -> int:
    """Tell every process of a role, or of all; return the exit code. Raises: BrokerError."""
    roles = list(Role) if role == ALL else [Role(role)]
    asyncio.run(_run(roles, level, settings))
    return 0


async def _run(roles: Sequence[Role], level: LevelName, settings: BrokerSettings) -> None:
    async with connected(settings) as broker, WorkerTable(broker) as table:
        await tell(broker, roles, level)
        await asyncio.sleep(HEAR_S)
        found = {role: sum(beat.role == role for beat in table.workers()) for role in roles}
    for role, num in found.items():
        sys.stdout.write(f"{role}: {level}, {num} running\n")


async def tell(broker: Broker, roles: Sequence[Role], level: LevelName) -> None:
    """Publish the level. Raises: BrokerError, DeniedError."""
    for role in roles:
        await broker.publish(subjects.log_level(role), wire.encode(LogLevel(level=level)))
