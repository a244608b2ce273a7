"""`headrace up` and `headrace demo` as a person runs them, with the fake engine."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.e2e

TIMEOUT_S = 60.0
FAKE = ("--engine", "fake", "--port", "0", "--set", "up.ready_timeout_s=60")


class Command:
    """A running `headrace` with a home of its own."""

    def __init__(self, home: Path, arguments: Sequence[str]) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", *arguments],
            env={**os.environ, "HEADRACE_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> str:
        """Return the address that it prints once it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"ready (http://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, self.finish()
        return found[1]

    def finish(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of a command that ends."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.process.kill()
        command.process.communicate()


def descendants(pid: int) -> list[int]:
    """Return every process below this one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid for child in children for pid in (int(child), *descendants(int(child)))]


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that is no child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], TIMEOUT_S)[0])
    finally:
        os.close(descriptor)


def test_up_serves_until_it_is_told_to_end_and_leaves_nothing(
    tmp_path: Path, commands: list[Command]
) -> None:
    up = Command(tmp_path, ["up", *FAKE])
    commands.append(up)
    url = up.wait_ready()
    assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    below = descendants(up.process.pid)
    assert len(below) == 8  # the guard, the broker, the gateway, the batch worker and four stages
    up.process.send_signal(signal.SIGTERM)
    code, _, err = up.finish()
    assert code == 0, err
    assert all(has_ended(pid) for pid in below)
    for role in ("render", "prefill", "decode", "derender", "gateway"):
        assert re.search(rf"^{role} +ready in \d+\.\d s$", err, re.MULTILINE)


def test_nothing_of_a_stack_outlives_an_up_that_was_killed(
    tmp_path: Path, commands: list[Command]
) -> None:
    up = Command(tmp_path, ["up", *FAKE])
    commands.append(up)
    up.wait_ready()
    below = descendants(up.process.pid)
    up.process.kill()
    assert all(has_ended(pid) for pid in below)


def test_a_second_signal_ends_a_stack_that_can_not_drain(
    tmp_path: Path, commands: list[Command]
) -> None:
    up = Command(tmp_path, ["up", *FAKE])
    commands.append(up)
    up.wait_ready()
    below = descendants(up.process.pid)
    (gateway,) = [pid for pid in below if "gateway" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(gateway, signal.SIGSTOP)
    up.process.send_signal(signal.SIGINT)
    assert up.process.stderr is not None
    while not up.process.stderr.readline().startswith("draining"):
        assert up.process.poll() is None
    up.process.send_signal(signal.SIGINT)
    code, _, _ = up.finish()
    assert code == 1
    assert all(has_ended(pid) for pid in below)


def test_a_worker_that_hangs_as_a_whole_is_killed_and_started_again(
    tmp_path: Path, commands: list[Command]
) -> None:
    up = Command(tmp_path, ["up", *FAKE, "--set", "up.silent_s=6"])
    commands.append(up)
    up.wait_ready()
    (decode,) = [
        pid
        for pid in descendants(up.process.pid)
        if "decode" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(decode, signal.SIGSTOP)
    assert has_ended(decode)
    assert up.process.stderr is not None
    told = (line for line in up.process.stderr if line.startswith("decode-0 "))
    assert next(told) == "decode-0 has sent no heartbeat for 6 s (up.silent_s); killing it\n"
    assert next(told) == "decode-0 was killed by signal 9; starting it again in 0.5 s\n"


def test_a_second_stack_on_the_same_store_is_refused(
    tmp_path: Path, commands: list[Command]
) -> None:
    first = Command(tmp_path, ["up", *FAKE])
    commands.append(first)
    first.wait_ready()
    assert first.process.stderr is not None
    while not (line := first.process.stderr.readline()).startswith("broker nats://127.0.0.1:"):
        assert first.process.poll() is None
        assert line
    address = line.split()[1]
    second = Command(tmp_path, ["up", *FAKE])
    commands.append(second)
    code, out, err = second.finish()
    assert (code, out) == (2, "")
    assert "another stack uses the broker's store" in err
    assert f"up.nats_url={address}\n" in err


def test_a_port_in_use_is_refused_before_anything_starts(
    tmp_path: Path, commands: list[Command]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = Command(tmp_path, ["up", "--engine", "fake", "--port", str(port)])
        commands.append(up)
        code, out, err = up.finish()
    assert (code, out) == (2, "")
    assert err == (
        f"headrace: 127.0.0.1:{port} is in use: choose another gateway.port, or 0 for a free one\n"
    )
    assert not (tmp_path / "run").exists()


def test_the_demo_answers_and_shows_where_the_time_went(
    tmp_path: Path, commands: list[Command]
) -> None:
    demo = Command(tmp_path, ["demo", *FAKE, "Which river runs through Paris?"])
    commands.append(demo)
    code, out, err = demo.finish()
    assert code == 0, err
    assert "> Which river runs through Paris?" in out
    assert re.search(r"^KV transfer +\d+\.\d ms  \d+\.\d MB$", out, re.MULTILINE)
    assert "The prefill was remote: prefill-" in out
