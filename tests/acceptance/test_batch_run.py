"""`headrace batch run --local` as a person runs it, with the fake engine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from .test_up import FAKE, Command, commands, descendants, has_ended

__all__ = ["commands"]

pytestmark = pytest.mark.e2e


def run(tmp_path: Path, *more: str) -> Command:
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return Command(tmp_path / "home", ["batch", "run", "--local", *files, *FAKE, *more])


def write(tmp_path: Path, count: int) -> None:
    body = {"prompt": "hello", "max_tokens": 16}  # the model is the one that is served
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": f"r{number}", **line}) for number in range(count)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))


def test_a_local_run_starts_a_stack_and_leaves_the_results_alone(
    tmp_path: Path, commands: list[Command]
) -> None:
    write(tmp_path, 20)
    batch = run(tmp_path)
    commands.append(batch)
    batch.wait_ready()
    below = descendants(batch.process.pid)
    code, _, err = batch.finish()
    assert code == 0, err
    assert all(has_ended(pid) for pid in below)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {result["custom_id"] for result in results} == {f"r{number}" for number in range(20)}
    assert all(result["response"]["body"]["choices"][0]["text"] for result in results)
    assert "20 ok and 0 failed" in err
    assert list(tmp_path.glob("home/run/*/nats/jetstream")) == []


def test_a_local_run_that_is_interrupted_drains_and_says_how_to_go_on(
    tmp_path: Path, commands: list[Command]
) -> None:
    write(tmp_path, 500)
    batch = run(tmp_path, "--set", "fake.step_s=0.5")
    commands.append(batch)
    batch.wait_ready()
    below = descendants(batch.process.pid)
    batch.process.send_signal(signal.SIGINT)
    code, _, err = batch.finish()
    assert code == 130, err
    assert all(has_ended(pid) for pid in below)
    assert (tmp_path / "out.jsonl").exists()
