"""What a request's end is called in its event."""

from __future__ import annotations

import pytest

from headrace.shared.events import end_of
from headrace.shared.messages import Status, Terminal


@pytest.mark.parametrize(
    ("request_id", "status", "answer", "change"),
    [
        ("resp_1", "ok", b'{"status":"completed"}', "completed"),
        ("resp_1", "ok", b'{"status":"incomplete"}', "incomplete"),
        ("resp_1", "ok", b"", "completed"),
        ("resp_1", "ok", b'{"status":5}', "completed"),
        ("resp_1", "error", b'{"status":"incomplete"}', "failed"),
        ("chat_1", "ok", b'{"status":"incomplete"}', "completed"),
    ],
)
@pytest.mark.parametrize("field", ["body", "result"])
def test_a_response_that_was_cut_short_is_incomplete(
    request_id: str, status: Status, answer: bytes, change: str, field: str
) -> None:
    end = Terminal(request_id=request_id, seq=0, status=status, http_status=200, **{field: answer})  # type: ignore[arg-type]
    assert end_of(end) == change
