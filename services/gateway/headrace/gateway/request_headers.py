"""What the headers of a request say."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from headrace.shared.deadlines import timeout_s
from headrace.shared.errors import MalformedMessageError
from headrace.shared.subjects import check_token

REQUEST_ID_HEADER = "X-Request-Id"
TIMEOUT_HEADER = "X-Request-Timeout"


def request_id_of(headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return the request's ID, and whether the client chose it (one that fits no subject is replaced)."""
    try:
        return check_token(headers.get(REQUEST_ID_HEADER, ""), REQUEST_ID_HEADER), True
    except MalformedMessageError:
        return uuid.uuid4().hex, False


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Return the seconds until the deadline that the client wishes. None: it names none.

    Raises: BadRequestError when they are no number of seconds up to a day.
    """
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return timeout_s(float(text), TIMEOUT_HEADER)
    except ValueError:
        return timeout_s(text, TIMEOUT_HEADER)
