"""The output lines of a batch, in the form of `vllm run-batch`."""

from __future__ import annotations

import msgspec

from headrace.cli.batch_checkpoint import LineId
from headrace.client import Result
from headrace.shared.errors import RequestError
from headrace.shared.openai_errors import error_body

NULL = msgspec.Raw(b"null")


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    error: msgspec.Raw = NULL  #: OpenAI's error object
    line: int = 0  #: of the input, from 1


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response
    error: _Error | None


_encoder = msgspec.json.Encoder()
_errors = msgspec.json.Decoder(_Error)


def of_result(line_id: LineId, custom_id: str, result: Result) -> bytes:
    """Return the line of a request that has ended."""
    if not result.is_ok:
        return _failed(line_id, custom_id, result.http_status, result.body)
    body = msgspec.Raw(_on_one_line(result.body))
    return _encoder.encode(_Line(str(line_id), custom_id, _response(line_id, 200, body), None))


def of_error(line_id: LineId, custom_id: str, error: RequestError) -> bytes:
    """Return the line of what was no request, or was refused before it was sent."""
    return _failed(line_id, custom_id, error.http_status, error_body(error))


def _failed(line_id: LineId, custom_id: str, status: int, body: bytes) -> bytes:
    error = _errors.decode(_on_one_line(body))
    error.line = line_id.number
    return _encoder.encode(_Line(str(line_id), custom_id, _response(line_id, status, NULL), error))


def _response(line_id: LineId, status: int, body: msgspec.Raw) -> _Response:
    return _Response(status, str(line_id), body)


def _on_one_line(body: bytes) -> bytes:
    """JSON may have line ends between its tokens, and only there."""
    return body.replace(b"\n", b" ").replace(b"\r", b" ")
