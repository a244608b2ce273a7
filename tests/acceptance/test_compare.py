"""`headrace bench --compare` as a person runs it, with the fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TIMEOUT_S = 480.0


def test_replicas_and_prefill_and_decode_are_measured_one_after_the_other(tmp_path: Path) -> None:
    load = ("--rates", "20,40", "--seconds", "0.2", "--input-len", "400", "--output-len", "4")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "headrace.cli.main", "bench", "--compare", "--engine", "fake"),
            *("--model", "m", "--vocab-size", "250", "--chunks", "", "--rounds", "1", *load),
            *("--output", str(tmp_path / "out")),
        ],
        env={**os.environ, "HEADRACE_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    setups = {setup["name"]: setup for setup in found["setups"]}
    assert list(setups) == ["coupled", "replicas", "pd"]
    assert "fake engine" in setups["coupled"]["skipped"]
    modes = {
        name: [point["stages"]["prefill_modes"] for point in setups[name]["points"]]
        for name in ("replicas", "pd")
    }
    assert modes["replicas"] == [{"local": 4}, {"local": 8}]
    assert [sum(some.values()) for some in modes["pd"]] == [4, 8]
    assert any("remote" in some for some in modes["pd"])
    assert len(found["verdict"]) == 3
    assert ended.stdout == (tmp_path / "out" / "table.md").read_text()
    for key in ("goodput_per_s", "itl_p99_ms", "ttft_p50_ms"):
        assert (tmp_path / "out" / f"{key}.svg").is_file()
