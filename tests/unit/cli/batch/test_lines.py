"""Lines of a batch's input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.batch.lines import read
from headrace.shared import batch_lines
from headrace.shared.batch_lines import Line, LineError, Parser
from headrace.shared.errors import SettingsError

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": []},
}


def line(found: Any, number: int = 1) -> Line:
    raw = found if isinstance(found, bytes) else json.dumps(found).encode()
    return Line(number=number, end=0, raw=raw)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("/v1/chat/completions", "chat.completions"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
    ],
)
def test_a_good_line_is_a_request_whose_body_is_untouched(url: str, endpoint: str) -> None:
    raw = b'{"body": {"model" : "m", "x": 1.50},"custom_id":"a","method":"POST","url":"%s"}'
    request = Parser(None).parse(line(raw % url.encode()))
    assert (request.custom_id, request.endpoint, request.model) == ("a", endpoint, "m")
    assert request.body == b'{"model" : "m", "x": 1.50}'


@pytest.mark.parametrize(
    ("change", "custom_id", "message"),
    [
        ({"custom_id": None}, "", "custom_id must be a string"),
        ({"custom_id": 7}, "", "custom_id must be a string"),
        ({"custom_id": ""}, "", "custom_id must be a string"),
        ({"method": "GET"}, "a", "method must be 'POST', got 'GET'"),
        ({"url": "/v1/embeddings"}, "a", "url must be one of /v1/chat/completions, "),
        ({"url": ["x"]}, "a", "url must be one of"),
        ({"body": None}, "a", "body: Expected `object`, got `null`"),
        ({"body": "text"}, "a", "body: Expected `object`, got `str`"),
        ({"body": {"messages": []}}, "a", r"body\.model must be"),
        ({"body": {"model": 3}}, "a", "body: Expected `str | null`, got `int`"),
        ({"body": {"model": "m", "stream": True}}, "a", "must not be sent in stream mode"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], custom_id: str, message: str) -> None:
    with pytest.raises(LineError) as caught:
        Parser(None).parse(line({**GOOD, **change}))
    assert message.replace("\\", "") in str(caught.value)
    assert caught.value.custom_id == custom_id


@pytest.mark.parametrize(
    "raw", [b"no JSON", b"[1]", b'"text"', b'{"custom_id": "\xff"}', b"[" * 100_000, b"{" * 9]
)
def test_what_is_no_object_is_one_error(raw: bytes) -> None:
    with pytest.raises(LineError, match="not a JSON object"):
        Parser(None).parse(line(raw))


def test_a_missing_body_is_named() -> None:
    without = {key: value for key, value in GOOD.items() if key != "body"}
    with pytest.raises(LineError, match="body: Expected `object`"):
        Parser(None).parse(line(without))


def test_a_custom_id_stands_in_one_line_only_and_the_second_has_none_of_its_own() -> None:
    parser = Parser(None)
    parser.parse(line(GOOD, 3))
    with pytest.raises(LineError, match="custom_id 'a' stands in line 3") as caught:
        parser.parse(line(GOOD, 9))
    assert caught.value.custom_id == ""


@pytest.mark.parametrize("body", [{"x": 1}, {"model": None, "x": 1}])
def test_a_body_without_a_model_gets_the_default(body: dict[str, Any]) -> None:
    request = Parser("m").parse(line({**GOOD, "body": body}))
    assert request.model == "m"
    assert json.loads(request.body) == {"model": "m", "x": 1}


def test_another_body_or_url_has_another_digest() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"body": {"model": "m2"}},
        {"url": "/v1/responses"},
    ]
    digests = {Parser(None).parse(line({**GOOD, **change})).digest for change in changes}
    assert len(digests) == 3


def test_blank_lines_count_and_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo")
    assert list(read(path)) == [
        Line(number=1, end=8, raw=b"one"),
        Line(number=4, end=15, raw=b"two"),
    ]


def test_a_line_that_is_too_long_is_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"short\n" + b"x" * 35 + b"\nlast\n")
    lines = list(read(path))
    assert [(found.number, found.raw) for found in lines] == [
        (1, b"short"),
        (2, b""),
        (3, b"last"),
    ]
    with pytest.raises(LineError, match="longer than 10 bytes"):
        Parser(None).parse(lines[1])


def test_a_file_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--input-file .*No such file"):
        list(read(tmp_path / "none"))
