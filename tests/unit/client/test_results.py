"""What a caller gets back, and what it may send."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.client import Part, Result
from headrace.client.body import encoded, model_of
from headrace.shared.errors import BadRequestError, ExpiredError, QueueFullError
from headrace.shared.messages import Chunk, Terminal

ERROR = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


def result(**changes: Any) -> Result:
    fields = {"request_id": "r1", "seq": 0, "status": "ok", "http_status": 200, "body": b"{}"}
    return Result.of_terminal(Terminal(**(fields | changes)))


def test_an_answer_is_its_json() -> None:
    found = result(body=b'{"id": "x"}')
    assert (found.is_ok, found.error, found.json()) == (True, None, {"id": "x"})


@pytest.mark.parametrize("status", ["error", "cancelled", "expired"])
def test_anything_but_an_answer_says_why(status: str) -> None:
    found = result(status=status, http_status=400, body=ERROR)
    assert (found.is_ok, found.error) == (False, "too long")


@pytest.mark.parametrize("body", [b"", b"[]", b"no", b'{"error": "x"}'])
def test_an_error_without_words_has_its_status(body: bytes) -> None:
    assert result(status="error", body=body).error == "request r1 ended error"


def test_a_stream_has_no_json_in_its_end() -> None:
    with pytest.raises(ValueError, match="was streamed"):
        result(body=b"").json()


@pytest.mark.parametrize(
    ("error", "status", "http_status"),
    [
        (BadRequestError("no"), "error", 400),
        (QueueFullError("full"), "error", 429),
        (ExpiredError("late"), "expired", 504),
    ],
)
def test_what_was_not_accepted_is_a_result_too(error: Any, status: str, http_status: int) -> None:
    found = Result.of_error("r1", error)
    assert (found.status, found.http_status, found.error) == (status, http_status, str(error))


def test_a_part_is_the_json_of_its_chunks() -> None:
    part = Part.of_chunk(Chunk(request_id="r1", seq=3, chunks=(b"1", b"2")))
    assert (part.seq, part.json()) == (3, [1, 2])


def test_bytes_go_through_untouched() -> None:
    body = b'{ "model":"m",  "x": 1 }'
    assert encoded(body) is body
    assert model_of(body) == "m"
    assert encoded({"model": "é"}) == '{"model":"é"}'.encode()


@pytest.mark.parametrize(
    "body", [b"", b"no", b"[]", b"{}", b'{"model": 1}', b'{"model": null}', b"\xff", b"[" * 9_999]
)
def test_a_body_without_a_model_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="`model`") as refused:
        model_of(body)
    assert refused.value.param == "model"


@pytest.mark.parametrize("value", [object(), 1j, {1j: 1}])
def test_what_json_can_not_say_is_refused(value: object) -> None:
    with pytest.raises(BadRequestError, match="what JSON can say"):
        encoded({"model": "m", "x": value})


def test_a_number_that_is_none_becomes_null() -> None:
    assert encoded({"model": "m", "temperature": math.nan}) == b'{"model":"m","temperature":null}'
