"""What goes wrong at the HTTP edge only.

RequestError
├── InvalidBodyError        400: the body is no JSON object that a request could be
├── UnauthorizedError       401: no API key, or one that is not good here
├── NotFoundError           404: this tenant has no such thing
│   └── ResponseNotFoundError    … no such response, in OpenAI's words
├── BodyTimeoutError        408: the body did not arrive in time
├── DuplicateRequestError   409: the request ID was used before
├── StateConflictError      409: what it is at the moment does not allow it
├── InFlightError           409: the call with this key is not answered yet
├── GoneError               410: this part of the answer is kept no longer
├── KeyReusedError          422: the key was used for another call
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
MAX_SHOWN_ID = 128  # characters of a client's ID that an error repeats


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


class NotFoundError(RequestError):
    """This tenant has no such file, batch, response, request or webhook endpoint."""

    code = "not_found"
    http_status = 404
    error_type = "NotFoundError"


class StateConflictError(RequestError):
    """What the file or batch is at the moment does not allow it; the message says what would."""

    code = "state_conflict"
    http_status = 409
    error_type = "ConflictError"


class ResponseNotFoundError(NotFoundError):
    """This tenant has no such response; worded as OpenAI's API words it."""

    error_type = "invalid_request_error"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Response with id '{response_id[:MAX_SHOWN_ID]}' not found.", param="response_id"
        )


class InFlightError(RequestError):
    """A call with the same idempotency key is under way; `retry_after_s` is when to try again, in seconds."""

    code = "in_flight"
    http_status = 409
    error_type = "ConflictError"
    retryable = True
    retry_after_s = 1.0


class GoneError(RequestError):
    """This part of the answer was kept for a while, and is not any more; the message says what still is."""

    code = "gone"
    http_status = 410
    error_type = "GoneError"


class KeyReusedError(RequestError):
    """The idempotency key was used for another call."""

    code = "idempotency_key_reused"
    http_status = 422
    error_type = "UnprocessableEntityError"


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
    if isinstance(error, QueueFullError | UnavailableError | InFlightError):
        return error.retry_after_s
    return NO_WORKER_RETRY_AFTER_S if isinstance(error, NoWorkerError) else None


def retry_after_header(retry_after_s: float) -> str:
    """Return the value of `Retry-After`: whole seconds, at least 1."""
    return str(max(1, math.ceil(retry_after_s)))
