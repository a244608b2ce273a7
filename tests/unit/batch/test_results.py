"""What a request's end is in the files of its batch."""

from __future__ import annotations

import json

import pytest

from headrace.batch import results
from headrace.shared.batches import BatchUsage
from headrace.shared.messages import Status, Terminal


def terminal(status: Status, http_status: int, body: bytes) -> Terminal:
    return Terminal(request_id="b-3", seq=0, status=status, http_status=http_status, body=body)


def test_an_answer_is_one_line_of_the_output() -> None:
    body = b'{"x": 1.50,\r\n "usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
    found = results.of_terminal(terminal("ok", 200, body), "\u00e4")
    assert found.is_ok
    assert found.usage == BatchUsage(input_tokens=3, output_tokens=4)
    assert found.data.count(b"\n") == 1
    assert json.loads(found.data) == {
        "id": "b-3",
        "custom_id": "\u00e4",
        "response": {"status_code": 200, "request_id": "b-3", "body": json.loads(body)},
        "error": None,
    }


def test_a_refusal_is_a_response_with_its_status_in_the_other_file() -> None:
    found = results.of_terminal(terminal("error", 400, b'{"error": {"message": "no"}}'), "a")
    assert (found.is_ok, found.swept) == (False, "")
    line = json.loads(found.data)
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {"error": {"message": "no"}}
    assert line["error"] is None


@pytest.mark.parametrize("code", ["batch_expired", "batch_cancelled"])
def test_a_line_that_was_not_finished_says_why(code: str) -> None:
    found = results.of_code("b-3", "a", code)
    assert (found.is_ok, found.swept) == (False, code)
    line = json.loads(found.data)
    assert (line["response"], line["error"]["code"]) == (None, code)
    assert line["error"]["message"]


def test_an_answer_too_large_for_a_part_says_so() -> None:
    found = results.too_large("b-3", "a", 2_000_000, 1_000_000)
    assert (found.is_ok, found.swept) == (False, "")
    assert "2,000,000" in json.loads(found.data)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b"{}", BatchUsage()),
        (b'{"usage": null}', BatchUsage()),
        (b'{"usage": "many"}', BatchUsage()),
        (
            b'{"usage": {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2}, '
            b'"output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 3}}}',
            BatchUsage(input_tokens=5, cached_tokens=2, output_tokens=7, reasoning_tokens=3),
        ),
    ],
)
def test_usage_is_what_the_answer_states(body: bytes, usage: BatchUsage) -> None:
    assert results.usage_of(body) == usage
