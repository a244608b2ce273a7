"""How long a request may take, as its submitter says it."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.shared.errors import BadRequestError
from headrace.shared.subjects import Lane

MAX_TIMEOUT_S = 86_400.0
FIELD = "request_timeout"
"""In the JSON of a request: seconds from its acceptance until its deadline."""
KEPT_PAST_DEADLINE_S = 600.0


class _Fields(msgspec.Struct):
    request_timeout: Any = None


_decoder = msgspec.json.Decoder(_Fields)


def timeout_s(value: object, name: str) -> float:
    """Return a number of seconds, above 0 and up to a day.

    Raises: BadRequestError naming `name`, the header or the field.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise BadRequestError(
            f"{name} must be seconds, above 0 and at most {MAX_TIMEOUT_S:g}, got {value!r}"[:300],
            param=name,
        )
    return float(seconds)


def timeout_of_body(body: bytes) -> float | None:
    """Return the seconds that a request's JSON names. None: none, or it is no JSON, which render will say.

    Raises: BadRequestError when they are no number of seconds up to a day.
    """
    if FIELD.encode() not in body:  # nearly all: no need to parse it
        return None
    try:
        value = _decoder.decode(body).request_timeout
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return None if value is None else timeout_s(value, FIELD)


def kept_s(lane: Lane, deadline: float, now: float) -> float | None:
    """Return for how many seconds a large payload of a request must stay readable.

    None: as long as its queue keeps it, since whoever comes late for the answer of a `std` or `bulk` request is
    told how it ended. `deadline` and `now`: Unix seconds.
    """
    return max(0.0, deadline - now) + KEPT_PAST_DEADLINE_S if lane is Lane.RT else None
