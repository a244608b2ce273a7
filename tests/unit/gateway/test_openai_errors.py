import json

from headrace.shared.errors import BadRequestError, QueueFullError
from headrace.shared.openai_errors import error_body, failure_of


def test_an_error_has_openais_shape():
    error = BadRequestError("temperature must be at least 0, got -1", param="temperature")
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "temperature must be at least 0, got -1",
            "type": "BadRequestError",
            "param": "temperature",
            "code": 400,
        }
    }


def test_an_error_that_crossed_the_wire_has_the_same_body():
    for error in (BadRequestError("x", param="y"), QueueFullError("full")):
        assert error_body(failure_of(error)) == error_body(error)


def test_a_failure_keeps_what_a_retry_needs_to_know():
    failure = failure_of(QueueFullError("full"))
    assert (failure.code, failure.retryable) == ("queue_full", True)
