"""The lines of a batch's output, as OpenAI's API and `vllm run-batch` have them."""

from __future__ import annotations

import msgspec

NULL = msgspec.Raw(b"null")


class Response(msgspec.Struct):
    """What the request was answered with."""

    status_code: int
    request_id: str
    body: msgspec.Raw  #: JSON


class Line(msgspec.Struct):
    """One line; `error` is an object, or null."""

    id: str
    custom_id: str
    response: Response | None
    error: msgspec.Raw = NULL


_encoder = msgspec.json.Encoder()


def encoded(line: Line) -> bytes:
    """Return a line without its end."""
    return _encoder.encode(line)


def answered(line_id: str, custom_id: str, body: bytes, *, status_code: int = 200) -> bytes:
    """Return the line of a request that was answered with `body`, which is JSON, or empty."""
    response = Response(status_code, line_id, msgspec.Raw(on_one_line(body) or b"null"))
    return encoded(Line(line_id, custom_id, response))


def on_one_line(body: bytes) -> bytes:
    """JSON may have line ends between its tokens, and only there."""
    return body.replace(b"\n", b" ").replace(b"\r", b" ")
