"""A message that is too large to send, at each step of a request: an error that names the limit."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from headrace.shared.broker import blobs
from headrace.shared.subjects import Role

from .conftest import STAGES, Pipeline
from .test_faults import LONG, completion
from .test_flow import events

HELD_BACK = "~" * 1_900
"""A stop string: the text is held back until it can't be the beginning of it, and goes out at the end."""


def limit(monkeypatch: pytest.MonkeyPatch, prefix: str, max_bytes: int) -> None:
    """Let messages on subjects that begin with `prefix` have a small limit."""
    check_size = blobs.check_size

    def check(subject: str, num_bytes: int) -> None:
        with monkeypatch.context() as patch:
            if subject.startswith(prefix):
                patch.setattr(blobs, "MAX_PAYLOAD_BYTES", max_bytes)
            check_size(subject, num_bytes)

    monkeypatch.setattr(blobs, "check_size", check)


@pytest.mark.parametrize(
    ("prefix", "max_bytes", "more"),
    [
        ("hr.v1.req.", 2_000, {}),
        ("hr.v1.job.", 2_000, {}),
        ("hr.v1.pf.", 2_000, {}),
        ("hr.v1.kv.", 450, {}),
        ("hr.v1.out.", 1_000, LONG),
        ("hr.v1.out.", 1_000, {"stream": True, "stop": [HELD_BACK], **LONG}),
    ],
    ids=["submission", "job", "prefill task", "handoff", "terminal", "chunk"],
)
async def test_a_message_above_the_limit_ends_its_request_with_a_413_that_names_it(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    max_bytes: int,
    more: dict[str, Any],
) -> None:
    limit(monkeypatch, prefix, max_bytes)
    await pipeline.start(Role.GATEWAY, *STAGES)
    prompt = "too long " * 1_000
    answer = await client.post("/v1/completions", json=completion(pipeline, prompt, **more))
    if answer.status_code == 200:  # its first chunks were small enough
        error = events(answer.text)[-1]["error"]
        assert error["code"] == 413
    else:
        assert answer.status_code == 413, answer.text
        error = answer.json()["error"]
    assert error["type"] == "PayloadTooLargeError"
    assert f"the limit of {max_bytes:,} bytes" in error["message"]
