"""The fabric's benchmark: events are counted once, however they were cut, and only within the window."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FABRIC = Path(__file__).parents[3] / "benchmarks" / "fabric"


def program(name: str) -> ModuleType:
    """Import one of the programs, which are no package."""
    spec = importlib.util.spec_from_file_location(f"fabric_{name}", FABRIC / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(FABRIC))  # where they find one another
load = program("load")
summary = program("summary")

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(*events: bytes) -> bytes:
    body = b"".join(b"data: " + event + b"\n\n" for event in events)
    return b"%x\r\n" % len(body) + body + b"\r\n"


ANSWER = HEAD + chunk(b'{"a":1}') + chunk(b'{"a":2}', b'{"a":3}') + chunk(b"[DONE]") + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 7, 50, len(ANSWER)])
def test_events_are_counted_once_however_they_are_cut(size: int) -> None:
    stream, found = load.Stream(asked=0.0), load.Found()
    cuts = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    ends = [stream.read(cut, float(i + 1), found, 0.0) for i, cut in enumerate(cuts)]
    assert ends == [False] * (len(cuts) - 1) + [True]
    assert (stream.num_token_ids, found.num_token_ids) == (3, 3)


def test_what_came_before_the_window_does_not_count() -> None:
    stream, found = load.Stream(asked=0.0), load.Found()
    stream.read(HEAD + chunk(b"{}"), 1.0, found, 5.0)
    stream.read(chunk(b"{}"), 6.0, found, 5.0)
    stream.read(chunk(b"{}", b"{}"), 8.0, found, 5.0)
    assert (found.num_token_ids, found.ttft, found.gaps) == (3, [], [2.0])


def test_a_request_of_the_window_has_a_ttft() -> None:
    stream, found = load.Stream(asked=5.5), load.Found()
    stream.read(HEAD + chunk(b"{}"), 6.0, found, 5.0)
    assert found.ttft == [0.5]


@pytest.mark.parametrize("cut", [5, 100])
def test_what_is_no_good_answer_is_an_error(cut: int) -> None:
    answer = b"HTTP/1.1 503 Service Unavailable\r\n\r\nno worker"
    stream = load.Stream(asked=0.0)

    def read() -> None:
        for part in (answer[:cut], answer[cut:]):
            stream.read(part, 1.0, load.Found(), 0.0)

    with pytest.raises(load.AnswerError, match="503"):
        read()


def test_a_row_says_what_the_stack_adds() -> None:
    stack: dict[str, Any] = {
        "ttft_s": [0.012] * 10,
        "gaps_s": [0.021] * 100,
        "num_token_ids": 1_000,
        "num_answers": 10,
        "window_s": 2.0,
        "cpu_s": 0.01,
    }
    alone = {**stack, "ttft_s": [0.010] * 10, "gaps_s": [0.020] * 100}
    cpu_s = {"gateway": 0.05, "broker": 0.03, "other": 1.0, "rest": 0.4}
    row = summary.row(streams=1, step_s=0.02, token_ids=100, stack=stack, cpu_s=cpu_s, alone=alone)
    assert row["token_ids_per_s"] == 500
    assert row["ttft_ms"]["p50_added"] == pytest.approx(2.0)
    assert row["gap_ms"]["p99_ratio"] == pytest.approx(1.05)
    assert row["cpu_us_per_token_id"] == {"gateway": 50.0, "broker": 30.0, "all": 80.0}
    assert row["rest_of_the_machine_cores"] == 0.2
