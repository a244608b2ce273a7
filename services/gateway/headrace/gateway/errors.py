"""What goes wrong at the HTTP edge only.

RequestError
├── InvalidBodyError        400: the body is no JSON object that a request could be
├── UnauthorizedError       401: no API key, or one that is not good here
├── BodyTimeoutError        408: the body did not arrive in time
├── DuplicateRequestError   409: the request ID was used before
└── UnavailableError        503: try again after `retry_after_s`
"""

from __future__ import annotations

import math

from headrace.shared.errors import (
    BadRequestError,
    NoWorkerError,
    QueueFullError,
    RequestError,
)

NO_WORKER_RETRY_AFTER_S = 5.0


class InvalidBodyError(BadRequestError):
    """The body is no JSON object that a request could be; type as in vLLM's validation errors."""

    error_type = "Bad Request"


class UnauthorizedError(RequestError):
    """No API key, or one that is not good here; `challenge` is the value of `WWW-Authenticate`."""

    code = "unauthorized"
    http_status = 401
    error_type = "AuthenticationError"

    def __init__(self, message: str, *, challenge: str = "") -> None:
        super().__init__(message)
        self.challenge = f"Bearer {challenge}".rstrip()


class BodyTimeoutError(RequestError):
    """The body did not arrive in time; the message names the limit in seconds."""

    code = "body_timeout"
    http_status = 408
    error_type = "Request Timeout"


class DuplicateRequestError(RequestError):
    """The client's request ID was used before; another answer could be taken for this one."""

    code = "duplicate_request"
    http_status = 409
    error_type = "ConflictError"


class UnavailableError(RequestError):
    """The gateway cannot take or go on with requests at the moment; `retry_after_s` in seconds."""

    code = "unavailable"
    http_status = 503
    error_type = "ServiceUnavailableError"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_after_of(error: RequestError) -> float | None:
    """Return when to try again, in seconds. None: no advice."""
    if isinstance(error, QueueFullError | UnavailableError):
        return error.retry_after_s
    return NO_WORKER_RETRY_AFTER_S if isinstance(error, NoWorkerError) else None


def retry_after_header(retry_after_s: float) -> str:
    """Return the value of `Retry-After`: whole seconds, at least 1."""
    return str(max(1, math.ceil(retry_after_s)))
