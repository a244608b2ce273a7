"""The strict checker itself: it takes what is right, and each thing that is wrong turns it red."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .sse import (
    EVENT_STREAM,
    FramingError,
    RawAnswer,
    answer_of,
    chunks_of,
    dechunked,
    error_of,
    events_of,
    typed_events_of,
)

IDENTITY = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'
)
ERROR = b'data: {"error":{"message":"x","type":"T","param":null,"code":499}}\n\n'
DONE = b"data: [DONE]\n\n"


def stream(body: bytes, *, status: int = 200, content_type: str = EVENT_STREAM) -> RawAnswer:
    return RawAnswer(status, {"content-type": content_type}, body)


def typed(*events: tuple[str, dict[str, Any]]) -> RawAnswer:
    return stream(
        b"".join(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events)
    )


def numbered(*types: str) -> RawAnswer:
    return typed(*((t, {"type": t, "sequence_number": n}) for n, t in enumerate(types)))


def test_a_right_stream_passes() -> None:
    assert chunks_of(stream(CHUNK + CHUNK + DONE)) == [{**IDENTITY, "choices": []}] * 2
    assert "error" in chunks_of(stream(CHUNK + ERROR + DONE))[-1]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no blank line at the end"),
        (CHUNK + DONE[:-1], "no blank line at the end"),
        (CHUNK.replace(b"\n", b"\r\n") + DONE, "carriage return"),
        (CHUNK + b"\n" + DONE, "other lines"),
        (CHUNK + b": ping\n\n" + DONE, "other lines"),
        (b"id: 1\n" + CHUNK + DONE, "other lines"),
        (b"data: {}\n" + CHUNK + DONE, "other lines"),
        (CHUNK + b"data:\n\n" + DONE, "other lines"),
        (CHUNK + b"data: \n\n" + DONE, "blank field"),
        (CHUNK + b"data:  {}\n\n" + DONE, "blanks around"),
        (b"event: x\n" + CHUNK + DONE, "named event"),
        (CHUNK, "DONE"),
        (CHUNK + DONE + DONE, "DONE"),
        (CHUNK + DONE + CHUNK, "DONE"),
        (CHUNK + CHUNK[:-2] + b"{}\n\n" + DONE, "no JSON"),
        (CHUNK + b"data: {\n\n" + DONE, "no JSON"),
        (CHUNK.replace(b":1", b":NaN") + DONE, "NaN is no JSON"),
        (CHUNK.replace(b'"choices"', b'"model"') + DONE, "a key twice"),
        (CHUNK + b"data: 1\n\n" + DONE, "no object"),
        (CHUNK + ERROR + CHUNK + DONE, "after an error"),
        (CHUNK + CHUNK.replace(b'"c"', b'"d"') + DONE, "do not share"),
        (CHUNK.replace(b'"id"', b'"ID"') + DONE, "do not share"),
        (DONE, "do not share"),
    ],
)
def test_a_wrong_stream_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(FramingError, match=reason):
        chunks_of(stream(body))


def test_a_stream_has_its_status_and_content_type() -> None:
    with pytest.raises(FramingError, match="status 500"):
        chunks_of(stream(CHUNK + DONE, status=500))
    with pytest.raises(FramingError, match="text/plain"):
        chunks_of(stream(CHUNK + DONE, content_type="text/plain"))


def test_right_typed_events_pass() -> None:
    types = ["response.created", "response.in_progress", "response.completed"]
    assert [event["type"] for event in typed_events_of(numbered(*types))] == types


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (numbered("response.created", "response.in_progress"), "other ends"),
        (numbered("response.in_progress", "response.completed"), "other beginnings"),
        (numbered("response.created", "response.created", "error"), "other beginnings"),
        (numbered("response.created", "error", "response.failed"), "other ends"),
        (stream(numbered("response.created", "error").body + DONE), "no JSON"),
        (stream(b'data: {"type":"error","sequence_number":0}\n\n'), "called None"),
        (typed(("x", {"type": "response.created", "sequence_number": 0})), "called x"),
        (typed(("response.created", {"type": "response.created"})), "sequence_number than 0"),
        (
            typed(("response.created", {"type": "response.created", "sequence_number": 1})),
            "sequence_number than 0",
        ),
    ],
)
def test_wrong_typed_events_are_refused(answer: RawAnswer, reason: str) -> None:
    with pytest.raises(FramingError, match=reason):
        typed_events_of(answer)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"1\r\na\r\n0\r\n\r\nx", "after the last chunk"),
        (b"1\r\nab\r\n0\r\n\r\n", "not 1 bytes"),
        (b"1\r\na\r\n", "without a size"),
    ],
)
def test_a_chunked_body_ends_with_its_last_chunk(raw: bytes, reason: str) -> None:
    assert dechunked(b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n") == b"abc"
    with pytest.raises(FramingError, match=reason):
        dechunked(raw)


@pytest.mark.parametrize("body", [b"a", b"abc"])
def test_a_body_has_the_length_that_was_announced(body: bytes) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
    assert answer_of(head, b"ab") == RawAnswer(200, {"content-length": "2"}, b"ab")
    with pytest.raises(FramingError, match="announced as 2"):
        answer_of(head, body)


def test_the_events_of_a_body_keep_name_and_data() -> None:
    (event,) = events_of(b"event: x\ndata: {}\n\n")
    assert (event.name, event.data) == ("x", "{}")


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (200, "application/json", {"message": "x", "type": "T", "param": None, "code": 200}),
        (400, "text/plain", {"message": "x", "type": "T", "param": None, "code": 400}),
        (400, "application/json", {"message": "", "type": "T", "param": None, "code": 400}),
        (400, "application/json", {"message": "x", "type": "T", "param": None, "code": "400"}),
        (400, "application/json", {"message": "x", "type": "T", "code": 400}),
        (400, "application/json", "x"),
    ],
)
def test_an_error_has_status_type_and_shape(status: int, content_type: str, body: Any) -> None:
    right = {"message": "x", "type": "T", "param": None, "code": 400}
    for_right = json.dumps({"error": right}).encode()
    assert error_of(stream(for_right, status=400, content_type="application/json")) == right
    with pytest.raises(FramingError):
        error_of(
            stream(for_right[:-1] + b',"more":1}', status=400, content_type="application/json")
        )
    wrong = json.dumps({"error": body}).encode()
    with pytest.raises(FramingError):
        error_of(stream(wrong, status=status, content_type=content_type))
