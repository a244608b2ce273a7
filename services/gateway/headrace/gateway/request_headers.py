"""What the headers of a request say."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

from headrace.shared.deadlines import timeout_s
from headrace.shared.errors import MalformedMessageError
from headrace.shared.subjects import check_token

REQUEST_ID_HEADER = "X-Request-Id"
TIMEOUT_HEADER = "X-Request-Timeout"


def request_id_of(scope: Scope) -> tuple[str, bool]:
    """Return the request's ID, and whether the client chose it (one that fits no subject is replaced).

    A request has one, however often it is asked for.
    """
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        state["request_id"] = _chosen(Headers(scope=scope)) or (uuid.uuid4().hex, False)
    found: tuple[str, bool] = state["request_id"]
    return found


def _chosen(headers: Mapping[str, str]) -> tuple[str, bool] | None:
    try:
        return check_token(headers.get(REQUEST_ID_HEADER, ""), REQUEST_ID_HEADER), True
    except MalformedMessageError:
        return None


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
