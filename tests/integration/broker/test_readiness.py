"""What the launcher knows of the workers, by their heartbeats on a real broker."""

from __future__ import annotations

import msgspec

from headrace.cli import readiness
from headrace.shared.broker import Broker
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import BrokerSettings, Settings
from headrace.shared.subjects import Role
from headrace.shared.workers import Beacon, WorkerTable


async def test_a_worker_that_is_loading_is_not_one_that_can_fall_silent(
    broker: Broker, broker_settings: BrokerSettings, slug: str
) -> None:
    beat = Heartbeat(
        role=Role.RENDER,
        instance=f"render-{slug}",
        model=slug,
        contract="c",
        state="starting",
        slots=1,
        num_running=0,
    )

    def mine(table: WorkerTable) -> list[Heartbeat]:
        return [worker for worker in table.workers() if worker.instance == beat.instance]

    async with (
        readiness.watch(Settings(broker=broker_settings), "http://127.0.0.1:1") as watched,
        WorkerTable(broker) as table,
    ):
        beacon = Beacon(broker, lambda: beat)
        await beacon.beat()
        await table.wait_for(lambda table: bool(mine(table)))
        (process,) = {worker.process for worker in mine(table)}
        loading = watched.heard()
        beat = msgspec.structs.replace(beat, state="ready")
        await beacon.beat()
        while process not in (watched.heard() or ()):
            await table.wait_for(lambda table: mine(table)[0].state == "ready")
        assert loading is not None
        assert process not in loading
