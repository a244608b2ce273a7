"""`headrace serve` as a process, with a stand-in for the service."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

TIMEOUT_S = 30.0

NEVER_DRAINS = """
import asyncio, sys
from types import ModuleType
from headrace.cli.main import main

async def run(settings, *, engine, stop):
    print("up", flush=True)
    await stop.wait()
    print("told", flush=True)
    await asyncio.Event().wait()

service = ModuleType("headrace.render.service")
service.run = run
sys.modules[service.__name__] = service
main(["serve", "render", "--engine", "fake"])
"""
DRAINS = NEVER_DRAINS.replace("    await asyncio.Event().wait()\n", "")


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("started", [DRAINS], indirect=True)
def test_a_term_signal_ends_a_service_that_drains_with_code_0(
    started: subprocess.Popen[str],
) -> None:
    assert next_line(started) == "up\n"
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=TIMEOUT_S)
    assert out == "told\n"
    assert "action=drained" in err
    assert started.returncode == 0


@pytest.mark.parametrize("started", [NEVER_DRAINS], indirect=True)
def test_a_second_signal_ends_a_service_that_does_not_drain(
    started: subprocess.Popen[str],
) -> None:
    assert next_line(started) == "up\n"
    started.send_signal(signal.SIGTERM)
    assert next_line(started) == "told\n"
    started.send_signal(signal.SIGTERM)
    assert started.wait(TIMEOUT_S) == 1


WAITS_FOR_A_BROKER = """
import logging, sys
from headrace.cli.main import main
from headrace.shared.broker import Broker

connect = Broker.connect

async def told(*args, **more):
    print("connecting", flush=True)
    return await connect(*args, **more)

Broker.connect = told
main(["serve", "render", "--engine", "fake", "--set", "broker.url=nats://127.0.0.1:1"])
"""


@pytest.mark.parametrize("started", [WAITS_FOR_A_BROKER], indirect=True)
def test_a_signal_ends_a_worker_that_still_waits_for_the_broker(
    started: subprocess.Popen[str],
) -> None:
    assert next_line(started) == "connecting\n"
    started.send_signal(signal.SIGTERM)
    assert started.wait(TIMEOUT_S) == 0
