"""A request as it is submitted: the client's own JSON, on a subject that says for whom, with a few headers.

Any service may publish one without headrace's help: the body, and `Nats-Msg-Id`, are all that it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from headrace.shared.deadlines import timeout_of_body
from headrace.shared.errors import BadRequestError, MalformedMessageError
from headrace.shared.messages import Endpoint
from headrace.shared.settings import RenderSettings
from headrace.shared.subjects import Lane, check_token, parse_req, reply, req

MESSAGE_ID = "Nats-Msg-Id"
REQUEST_ID = "Hr-Request-Id"
ENDPOINT = "Hr-Endpoint"
DEADLINE = "Hr-Deadline"
ACCEPTED = "Hr-Accepted"
TRACEPARENT = "traceparent"
REPLY_TO = "Hr-Reply-To"
OWN_ID = "Hr-Own-Id"
READER = "Hr-Reader"
KEEP = "Hr-Keep"

DEFAULT_DEADLINE_S = RenderSettings().deadlines_s

_ENDPOINTS: dict[str, Endpoint] = {endpoint: endpoint for endpoint in get_args(Endpoint)}
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def valid_traceparent(value: str | None) -> str | None:
    """Return a W3C trace context if it is one, else None: a broken one must not fail the request."""
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One request: an edge, or any service → render."""

    request_id: str  #: names the request everywhere; a subject token. Header `Hr-Request-Id`, else `Nats-Msg-Id`
    tenant: str  #: whose request it is. From the subject
    slug: str  #: the model's subject token. From the subject
    lane: Lane  #: how urgent it is. From the subject
    endpoint: Endpoint  #: which OpenAI endpoint the body is for. Header `Hr-Endpoint`
    deadline: float  #: after this it ends `expired` (Unix seconds). Header `Hr-Deadline`
    accepted: float  #: when the edge accepted it (Unix seconds). Header `Hr-Accepted`
    body: bytes  #: the client's own JSON, untouched
    traceparent: str | None = None  #: W3C trace context. None: not traced
    reply_to: str | None = None  #: where its end is told too. Header `Hr-Reply-To`. None: nowhere
    is_own_id: bool = True  #: the caller chose `request_id`. Header `Hr-Own-Id`; `0`: the edge did
    reader: str | None = None  #: who waits for the answer. Header `Hr-Reader`. None: nobody says
    keeps_result: bool = (
        False  #: the terminal is kept on `res` in lane `rt` too. Header `Hr-Keep`; `1`: it is
    )

    @property
    def is_kept(self) -> bool:
        """Whether its terminal is kept on `res`."""
        return self.lane is not Lane.RT or self.keeps_result

    @property
    def subject(self) -> str:
        """Where it is published."""
        return req(self.tenant, self.slug, self.lane)

    def to_headers(self) -> dict[str, str]:
        """Return the headers to publish `body` with; the broker layer adds `Nats-Msg-Id`, from `message_id`."""
        headers = {
            REQUEST_ID: self.request_id,
            ENDPOINT: self.endpoint,
            DEADLINE: f"{self.deadline:.6f}",
            ACCEPTED: f"{self.accepted:.6f}",
        }
        if self.traceparent is not None:
            headers[TRACEPARENT] = self.traceparent
        if self.reply_to is not None:
            headers[REPLY_TO] = self.reply_to
        if self.reader is not None:
            headers[READER] = self.reader
        if not self.is_own_id:
            headers[OWN_ID] = "0"
        if self.keeps_result:
            headers[KEEP] = "1"
        return headers

    @property
    def message_id(self) -> str:
        """Tells the broker a repeated publish; holds the tenant, so that two may use the same request ID."""
        return f"{self.tenant}.{self.request_id}"

    @classmethod
    def from_received(
        cls,
        subject: str,
        headers: Mapping[str, str] | None,
        payload: bytes,
        now: float,
        *,
        default_deadline_s: Mapping[Lane, float] = DEFAULT_DEADLINE_S,
        max_deadline_s: float = math.inf,
    ) -> Submission:
        """Return the submission in a message taken at `now` (Unix seconds).

        Without headers it is a chat, accepted now. Where no header names the deadline, the body's
        `request_timeout` does, or else `default_deadline_s`; at most `max_deadline_s` after `now`.
        Raises: MalformedMessageError naming the subject or the header that is wrong.
        """
        tenant, slug, lane = parse_req(subject)
        headers = headers or {}
        endpoint = headers.get(ENDPOINT, "chat.completions")
        if endpoint not in _ENDPOINTS:
            raise MalformedMessageError(
                f"{ENDPOINT} must be one of {', '.join(_ENDPOINTS)}, got {endpoint!r}"
            )
        accepted = _time(headers, ACCEPTED, now)
        deadline = _deadline(headers, payload, accepted, default_deadline_s[lane])
        if deadline > now + max_deadline_s:
            raise MalformedMessageError(
                f"{DEADLINE} must be at most {max_deadline_s:g} s after the submission (render.max_deadline_s), "
                f"got {deadline - now:g} s"
            )
        reader = headers.get(READER)
        return cls(
            request_id=_request_id(headers),
            tenant=check_token(tenant, "tenant"),
            slug=check_token(slug, "model"),
            lane=lane,
            endpoint=_ENDPOINTS[endpoint],
            deadline=deadline,
            accepted=accepted,
            body=payload,
            traceparent=valid_traceparent(headers.get(TRACEPARENT)),
            reply_to=check_reply_to(headers.get(REPLY_TO), tenant),
            is_own_id=headers.get(OWN_ID) != "0",
            reader=None if reader is None else check_token(reader, READER),
            keeps_result=keeps_result(headers),
        )


def check_reply_to(subject: str | None, tenant: str) -> str | None:
    """Return where a terminal is to be published once more, if a tenant may listen there. None: nowhere.

    Raises: MalformedMessageError naming the header; any other subject would be somebody else's.
    """
    if subject is None:
        return None
    token = check_token(subject.rpartition(".")[2], f"the last token of {REPLY_TO}")
    if subject != reply(tenant, token):
        raise MalformedMessageError(f"{REPLY_TO} must be {reply(tenant, 'TOKEN')}, got {subject!r}")
    return subject


def reply_to_of(headers: Mapping[str, str] | None, tenant: str) -> str | None:
    """Return where the caller of a wrong submission wants to be told as well. None: nowhere, or it is wrong too."""
    try:
        return check_reply_to((headers or {}).get(REPLY_TO), tenant)
    except MalformedMessageError:
        return None


def keeps_result(headers: Mapping[str, str] | None) -> bool:
    """Return whether the terminal is to be kept on `res` in lane `rt` too."""
    return (headers or {}).get(KEEP) == "1"


def caller_of(subject: str, headers: Mapping[str, str] | None) -> tuple[str, Lane, str]:
    """Return tenant, lane and request ID of a submission that is otherwise wrong, so that its caller can be told.

    Raises: MalformedMessageError when they can't be read either.
    """
    tenant, _, lane = parse_req(subject)
    return check_token(tenant, "tenant"), lane, _request_id(headers or {})


def _request_id(headers: Mapping[str, str]) -> str:
    for name in (REQUEST_ID, MESSAGE_ID):
        if name in headers:
            return check_token(headers[name], name)
    raise MalformedMessageError(
        f"a submission needs the header {MESSAGE_ID}, or {REQUEST_ID}: it is the request ID"
    )


def _deadline(headers: Mapping[str, str], body: bytes, accepted: float, default_s: float) -> float:
    if DEADLINE not in headers:
        try:
            in_body_s = timeout_of_body(body)
        except BadRequestError as error:
            raise MalformedMessageError(error.message) from None
        default_s = default_s if in_body_s is None else in_body_s
    return _time(headers, DEADLINE, accepted + default_s)


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
