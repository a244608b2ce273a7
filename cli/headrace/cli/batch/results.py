"""The output lines of a batch, in the form of `vllm run-batch`."""

from __future__ import annotations

import msgspec

from headrace.cli.batch.checkpoint import LineId
from headrace.client import Result
from headrace.shared.batch_results import NULL, Line, Response, answered, encoded, on_one_line
from headrace.shared.errors import RequestError
from headrace.shared.openai_errors import error_body


class _Error(msgspec.Struct):
    error: msgspec.Raw = NULL  #: OpenAI's error object
    line: int = 0  #: of the input, from 1


_encoder = msgspec.json.Encoder()
_errors = msgspec.json.Decoder(_Error)


def of_result(line_id: LineId, custom_id: str, result: Result) -> bytes:
    """Return the line of a request that has ended."""
    if not result.is_ok:
        return _failed(line_id, custom_id, result.http_status, result.body)
    return answered(str(line_id), custom_id, result.body)


def of_error(line_id: LineId, custom_id: str, error: RequestError) -> bytes:
    """Return the line of what was no request, or was refused before it was sent."""
    return _failed(line_id, custom_id, error.http_status, error_body(error))


def _failed(line_id: LineId, custom_id: str, status: int, body: bytes) -> bytes:
    error = _errors.decode(on_one_line(body))
    error.line = line_id.number
    response = Response(status, str(line_id), NULL)
    wrong = msgspec.Raw(_encoder.encode(error))
    return encoded(Line(str(line_id), custom_id, response, wrong))
