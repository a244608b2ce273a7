"""Batches under fire, for a minute: the long run is `make chaos-batch`."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from .batch_lines import check_files, expected_text, make_lines
from .test_chaos import run


@pytest.mark.e2e
def test_a_batch_has_one_right_result_a_line_whatever_is_killed() -> None:
    run("tests.faults.batch", *"--seed 5 --lines 300 --kills 4".split())


@pytest.mark.e2e
def test_batch_run_has_one_right_result_a_line_however_often_it_is_killed() -> None:
    run("tests.faults.batch", *"--seed 5 --lines 300 --kills 2 --run".split())


def _right(line: dict[str, Any]) -> bytes:
    body = {"choices": [{"text": expected_text(line["body"])}]}
    response = {"status_code": 200, "body": body}
    return json.dumps({"custom_id": line["custom_id"], "response": response}).encode() + b"\n"


def test_a_missing_a_second_and_a_wrong_result_are_found() -> None:
    lines = make_lines(random.Random(1), 3)
    for line in lines:
        line["body"]["max_tokens"] = 5
    assert {found.kind for found in check_files(lines, b"", b"")} == {"count"}
    good = [_right(line) for line in lines]
    assert check_files(lines, b"".join(good), b"") == []
    assert [found.kind for found in check_files(lines, b"".join([*good, good[0]]), b"")] == [
        "count"
    ]
    wrong = good[0].replace(b'"text": "', b'"text": "x')
    assert [found.kind for found in check_files(lines, b"".join([wrong, *good[1:]]), b"")] == [
        "result"
    ]
    torn = b"".join(good)[:-20]
    assert {found.kind for found in check_files(lines, torn, b"")} == {"file", "count"}
