"""A request as it is submitted: the client's own JSON, on a subject that says for whom, with a few headers.

Any service may publish one without headrace's help: the body, and `Nats-Msg-Id`, are all that it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from headrace.shared.errors import MalformedMessageError
from headrace.shared.messages import Endpoint
from headrace.shared.subjects import Lane, check_token, parse_req, req

MESSAGE_ID = "Nats-Msg-Id"
ENDPOINT = "Hr-Endpoint"
DEADLINE = "Hr-Deadline"
ACCEPTED = "Hr-Accepted"
TRACEPARENT = "traceparent"

DEFAULT_DEADLINE_S = {Lane.RT: 600.0, Lane.STD: 3_600.0, Lane.BULK: 86_400.0}

_ENDPOINTS: dict[str, Endpoint] = {endpoint: endpoint for endpoint in get_args(Endpoint)}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(value: str | None) -> str | None:
    """Return a W3C trace context if it is one, else None: a broken one must not fail the request."""
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One request: an edge, or any service → render."""

    request_id: str  #: names the request everywhere; a subject token. Header `Nats-Msg-Id`
    tenant: str  #: whose request it is. From the subject
    slug: str  #: the model's subject token. From the subject
    lane: Lane  #: how urgent it is. From the subject
    endpoint: Endpoint  #: which OpenAI endpoint the body is for. Header `Hr-Endpoint`
    deadline: float  #: after this it ends `expired` (Unix seconds). Header `Hr-Deadline`
    accepted: float  #: when the edge accepted it (Unix seconds). Header `Hr-Accepted`
    body: bytes  #: the client's own JSON, untouched
    traceparent: str | None = None  #: W3C trace context. None: not traced

    @property
    def subject(self) -> str:
        """Where it is published."""
        return req(self.tenant, self.slug, self.lane)

    def to_headers(self) -> dict[str, str]:
        """Return the headers to publish `body` with; the broker layer adds `Nats-Msg-Id`."""
        headers = {
            ENDPOINT: self.endpoint,
            DEADLINE: f"{self.deadline:.6f}",
            ACCEPTED: f"{self.accepted:.6f}",
        }
        if self.traceparent is not None:
            headers[TRACEPARENT] = self.traceparent
        return headers

    @classmethod
    def from_received(
        cls, subject: str, headers: Mapping[str, str] | None, payload: bytes, now: float
    ) -> Submission:
        """Return the submission in a message taken at `now` (Unix seconds).

        Without headers it is a chat, accepted now, with its lane's `DEFAULT_DEADLINE_S`.
        Raises: MalformedMessageError naming the subject or the header that is wrong.
        """
        tenant, slug, lane = parse_req(subject)
        headers = headers or {}
        if MESSAGE_ID not in headers:
            raise MalformedMessageError(
                f"a submission needs the header {MESSAGE_ID}: it is the request ID"
            )
        endpoint = headers.get(ENDPOINT, "chat.completions")
        if endpoint not in _ENDPOINTS:
            raise MalformedMessageError(
                f"{ENDPOINT} must be one of {', '.join(_ENDPOINTS)}, got {endpoint!r}"
            )
        return cls(
            request_id=check_token(headers[MESSAGE_ID], MESSAGE_ID),
            tenant=check_token(tenant, "tenant"),
            slug=check_token(slug, "model"),
            lane=lane,
            endpoint=_ENDPOINTS[endpoint],
            deadline=_time(headers, DEADLINE, now + DEFAULT_DEADLINE_S[lane]),
            accepted=_time(headers, ACCEPTED, now),
            body=payload,
            traceparent=valid_traceparent(headers.get(TRACEPARENT)),
        )


def _time(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise MalformedMessageError(f"{name} must be Unix seconds, as 1767225600.5, got {text!r}")
    return value
