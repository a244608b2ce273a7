"""What can go wrong, as the caller sees it.

HeadraceError
├── RequestError             the request cannot be served as it is; goes back to its caller
│   ├── BadRequestError      400: what the caller sent is wrong
│   ├── ModelNotFoundError   404: no such model here
│   ├── PayloadTooLargeError 413: larger than a limit, which is named
│   ├── QueueFullError       429: the queue is full; try again after `retry_after_s`
│   ├── CancelledRequestError 499: cancelled by its caller
│   ├── EngineRequestError   500: the engine failed this request
│   ├── AnswerLostError      500: parts of the answer were lost and cannot be had again
│   ├── NoWorkerError        503: no live worker for a stage
│   └── ExpiredError         504: past its deadline
├── WireError                a message that this version cannot read; the message is refused, the worker goes on
│   ├── MalformedMessageError     truncated, or a field of the wrong type
│   ├── UnknownMessageError       a type that this receiver does not take
│   └── UnsupportedVersionError   a type it knows, in a version it does not
├── HandoffError             this handoff must not reach the decode engine; `reason` says why
├── ConflictError            somebody else has changed what was to be changed
├── FileGoneError            a file is not there any more, or not whole
├── BrokerError              the broker refused or did not answer
├── StoppedError             the process was stopped before it could begin
├── EngineDeadError          the engine is gone; the worker must end and be restarted
│   └── EngineStuckError     it is there, and makes no step while requests are in it
└── SettingsError            a setting is wrong; startup stops
"""

from __future__ import annotations


class HeadraceError(Exception):
    """The base of every error that headrace raises on purpose."""


class RequestError(HeadraceError):
    """A request that cannot be served; `http_status`, `error_type` and `param` as in OpenAI's error body."""

    code = "internal_error"
    http_status = 500
    error_type = "InternalServerError"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequestError(RequestError):
    """What the caller sent is wrong; sending it again will not help."""

    code = "bad_request"
    http_status = 400
    error_type = "BadRequestError"


class ModelNotFoundError(RequestError):
    """The request names a model that nothing here serves."""

    code = "model_not_found"
    http_status = 404
    error_type = "NotFoundError"


class PayloadTooLargeError(RequestError):
    """The request is larger than a limit; the message names the size, the limit and its setting."""

    code = "payload_too_large"
    http_status = 413
    error_type = "PayloadTooLargeError"


class QueueFullError(RequestError):
    """The queue takes no more; `retry_after_s` is when to try again, in seconds."""

    code = "queue_full"
    http_status = 429
    error_type = "TooManyRequestsError"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CancelledRequestError(RequestError):
    """The caller cancelled the request, or went away."""

    code = "cancelled"
    http_status = 499
    error_type = "CancelledError"


class EngineRequestError(RequestError):
    """The engine failed this request; other requests are not touched."""

    code = "engine_error"
    http_status = 500
    error_type = "InternalServerError"
    retryable = True


class AnswerLostError(RequestError):
    """Parts of the answer were lost and cannot be had again."""

    code = "answer_lost"
    retryable = True


class NoWorkerError(RequestError):
    """No live worker serves a stage that this request needs."""

    code = "no_worker"
    http_status = 503
    error_type = "ServiceUnavailableError"
    retryable = True


class ExpiredError(RequestError):
    """The request is past its deadline."""

    code = "expired"
    http_status = 504
    error_type = "TimeoutError"


class WireError(HeadraceError):
    """Bytes that this version cannot read as the message that was expected."""


class MalformedMessageError(WireError):
    """Truncated bytes, or a field of the wrong type."""


class UnknownMessageError(WireError):
    """A message type that this receiver does not take."""


class UnsupportedVersionError(WireError):
    """A known message type, in a version that this release does not read."""


class HandoffError(HeadraceError):
    """A handoff that must not reach the decode engine; `reason` is a stable word for metrics and tests."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConflictError(HeadraceError):
    """What is stored is not what the writer had read: somebody else wrote first. Read again, then decide."""


class FileGoneError(HeadraceError):
    """A file's content is not there, or not all of it: it was deleted, or lost. Asking again will not help."""


class BrokerError(HeadraceError):
    """The broker refused an operation, or did not answer in time."""


class StoppedError(HeadraceError):
    """The process was stopped before it could begin: no fault, and nothing to drain."""


class EngineDeadError(HeadraceError):
    """The engine is gone: every request in it failed, and the worker must end and be restarted."""


class EngineStuckError(EngineDeadError):
    """The engine makes no step while requests are in it: nothing that it was given will ever end."""


class SettingsError(HeadraceError):
    """A setting is wrong: the message names the setting, its value and what would be right."""
