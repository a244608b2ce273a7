"""What becomes of an answer that no message can carry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.derender import handler as handlers
from headrace.derender.handler import StreamHandler
from headrace.derender.renderer import Closed
from headrace.shared import token_ids
from headrace.shared.errors import PayloadTooLargeError
from headrace.shared.messages import Job, Prompt, StreamEnd
from headrace.shared.subjects import Lane

JOB = Job(
    request_id="r1",
    tenant="t",
    model="m",
    lane=Lane.RT,
    endpoint="completions",
    created=7,
    published=0.0,
    deadline=1.0,
    contract="c",
    body=b"{}",
    stream=False,
    prompts=(Prompt(token_ids=token_ids.pack([97]), sampling_params=b""),),
)
END = StreamEnd(stream_id=1, num_entries=0)


class Finished:
    """An answer of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def close(self) -> Closed:
        return Closed(body=b"x" * self._num_bytes)


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], StreamHandler]:
    monkeypatch.setattr(handlers, "MAX_BODY_BYTES", 1000)

    def make(num_bytes: int) -> StreamHandler:
        answer = Finished(num_bytes)
        return StreamHandler(JOB, answer, instance="d")  # type: ignore[arg-type] - only `close` is called

    return make


def test_a_whole_answer_too_large_for_a_message_is_an_error_that_says_so(
    handler: Callable[[int], StreamHandler],
) -> None:
    with pytest.raises(PayloadTooLargeError, match=r"1,001 bytes, and at most 1,000") as caught:
        handler(1001).close(END)
    assert handler(1001).fail(END, caught.value).http_status == 413


def test_a_whole_answer_that_fits_is_the_terminals_body(
    handler: Callable[[int], StreamHandler],
) -> None:
    assert handler(1000).close(END)[1].body == b"x" * 1000
