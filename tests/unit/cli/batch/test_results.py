"""The output lines of a batch."""

from __future__ import annotations

import json

from headrace.cli.batch import results as batch_results
from headrace.cli.batch.checkpoint import LineId
from headrace.client import Result
from headrace.shared.errors import BadRequestError

LINE_ID = LineId("run", 7, "0123456789ab", 0)
NAME = "run-7-0123456789ab-0"


def result(status: str, http_status: int, body: bytes) -> Result:
    return Result(request_id=NAME, status=status, http_status=http_status, body=body)  # type: ignore[arg-type]  # any of them


def test_an_answer_stands_in_its_line_as_it_came() -> None:
    line = batch_results.of_result(LINE_ID, "ä", result("ok", 200, b'{"x": 1.50,\r\n "y":"\\n"}'))
    assert line == (
        b'{"id":"%(n)b","custom_id":"\xc3\xa4","response":{"status_code":200,"request_id":"%(n)b",'
        b'"body":{"x": 1.50,   "y":"\\n"}},"error":null}' % {b"n": NAME.encode()}
    )


def test_an_error_has_its_status_and_its_line() -> None:
    body = b'{"error":{"message":"late","type":"TimeoutError","param":null,"code":504}}'
    found = json.loads(batch_results.of_result(LINE_ID, "a", result("expired", 504, body)))
    assert found["response"] == {"status_code": 504, "request_id": NAME, "body": None}
    assert found["error"] == {**json.loads(body), "line": 7}


def test_a_line_that_is_no_request_has_an_error_of_the_same_form() -> None:
    found = json.loads(batch_results.of_error(LINE_ID, "", BadRequestError("bad", param="url")))
    assert (found["id"], found["custom_id"]) == (NAME, "")
    assert found["response"]["status_code"] == 400
    assert found["error"] == {
        "error": {"message": "bad", "type": "BadRequestError", "param": "url", "code": 400},
        "line": 7,
    }
