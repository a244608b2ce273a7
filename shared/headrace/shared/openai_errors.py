"""Errors as a client of OpenAI's API sees them."""

from __future__ import annotations

import msgspec

from headrace.shared.errors import (
    BadRequestError,
    CancelledRequestError,
    ExpiredError,
    RequestError,
)
from headrace.shared.messages import Failure

_encoder = msgspec.json.Encoder()


def failure_of(error: RequestError) -> Failure:
    """Return the error as it crosses the wire."""
    return Failure(
        code=error.code,
        message=error.message,
        http_status=error.http_status,
        error_type=error.error_type,
        param=error.param,
        retryable=error.retryable,
    )


def error_of(failure: Failure) -> RequestError:
    """Return a failure from the wire as an error to raise; its class only where a caller must tell it apart."""
    known = {cls.code: cls for cls in (CancelledRequestError, ExpiredError, BadRequestError)}
    error = known.get(failure.code, RequestError)(failure.message, param=failure.param)
    error.code = failure.code
    error.http_status = failure.http_status
    error.error_type = failure.error_type
    error.retryable = failure.retryable
    return error


def error_body(error: RequestError | Failure) -> bytes:
    """Return the JSON body of an error: OpenAI's object, with the HTTP status as `code`, as vLLM has it."""
    return _encoder.encode(
        {
            "error": {
                "message": error.message,
                "type": error.error_type,
                "param": error.param,
                "code": error.http_status,
            }
        }
    )
