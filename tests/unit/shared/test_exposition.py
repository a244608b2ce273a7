from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.shared import exposition
from headrace.shared.errors import EngineDeadError, SettingsError
from headrace.shared.exposition import PROCESSES, Exposition, exposed
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import MetricsSettings
from headrace.shared.subjects import Role

from ...ports import free_port

BEAT = Heartbeat(
    role=Role.DECODE,
    instance="decode-1",
    model="m",
    contract="c",
    state="ready",
    slots=8,
    num_running=3,
)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    registry.register(PROCESSES)
    before = set(PROCESSES.shown)
    yield registry
    PROCESSES.shown = before


def test_a_process_shows_its_slots_and_what_its_stage_adds(registry: CollectorRegistry) -> None:
    PROCESSES.shown.add(Exposition(lambda: BEAT, lambda: {"headrace_handoffs_expired": 2}))
    labels = {"role": "decode", "worker": "decode-1"}
    assert registry.get_sample_value("headrace_slots", labels) == 8
    assert registry.get_sample_value("headrace_requests_running", labels) == 3
    assert registry.get_sample_value("headrace_handoffs_expired_total", labels) == 2


def test_a_dead_engine_does_not_keep_the_other_metrics_from_being_read(
    registry: CollectorRegistry,
) -> None:
    def dead() -> Heartbeat:
        raise EngineDeadError("gone")

    PROCESSES.shown.add(Exposition(dead, dict))
    assert b"headrace_slots" in generate_latest(registry)


async def test_without_a_port_nothing_is_served() -> None:
    async with exposed(MetricsSettings(), lambda: BEAT):
        assert all(shown.heartbeat() is not BEAT for shown in PROCESSES.shown)


async def test_a_port_that_is_taken_is_refused_by_the_settings_name(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(SettingsError, match=r"metrics\.port"):
            async with exposed(MetricsSettings(port=port), lambda: BEAT):
                pass


async def test_a_process_that_drains_is_live_and_not_ready(port: int) -> None:
    beat = msgspec.structs.replace(BEAT, state="draining")
    async with (
        exposed(MetricsSettings(port=port), lambda: beat),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).status_code == 503


async def test_a_loop_that_stands_still_is_not_live(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "STUCK_S", -1.0)
    async with (
        exposed(MetricsSettings(port=port), lambda: BEAT),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert (await client.get("/live")).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
