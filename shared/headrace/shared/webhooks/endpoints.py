"""Webhook endpoints and what was sent to them, as they are recorded (`records.py`).

A new field has a default, a field never changes its type or its meaning.
"""

from __future__ import annotations

import base64
import os
from hashlib import blake2b
from typing import Literal

import msgspec

from headrace.shared.events import Event

EVENT_TYPES = (
    "batch.in_progress",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
)
"""What an endpoint may be told of, in OpenAI's words."""
_SENT_AS = {"response.expired": "response.failed"}  # OpenAI has no word for it

MAX_ENDPOINTS = 64  # of a tenant
SECRET_BYTES = 32
OLD_SECRET_S = 86_400


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a tenant wants to be told of events."""

    id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    secret: str  #: `whsec_` and base64
    created_at: int  #: Unix seconds, as every `…_at`
    updated_at: int
    old_secret: str | None = None  #: signs as well until `old_secret_until`
    old_secret_until: int = 0
    disabled: str | None = None  #: why nothing is sent any more. None: it is sent

    def secrets(self, now: float) -> tuple[str, ...]:
        """Return what signs at `now` (Unix seconds), the newest first."""
        if self.old_secret is None or now >= self.old_secret_until:
            return (self.secret,)
        return (self.secret, self.old_secret)


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to an endpoint."""

    at: float  #: when it began (Unix seconds)
    seconds: float  #: how long it took
    status_code: int | None = None  #: None: there was no answer
    error: str | None = None  #: why there was none. None: there was one

    @property
    def is_ok(self) -> bool:
        """Whether the receiver has taken it."""
        return self.status_code is not None and 200 <= self.status_code < 300


class Sending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event on its way to one endpoint, or there, or given up."""

    id: str  #: the header `webhook-id`: the same at every attempt
    endpoint_id: str
    type: str
    subject: str  #: the batch or response
    created_at: float  #: when it was first tried (Unix seconds)
    state: Literal["pending", "delivered", "failed"] = "pending"
    attempts: tuple[Attempt, ...] = ()
    next_attempt_at: float | None = None  #: Unix seconds. None: there will be none


def new_secret() -> str:
    """Return a signing secret that nobody can guess."""
    return f"whsec_{base64.b64encode(os.urandom(SECRET_BYTES)).decode()}"


def type_of(event: Event) -> str:
    """Return what an event is called towards receivers."""
    return _SENT_AS.get(event.name, event.name)


def webhook_id_of(event: Event) -> str:
    """Return the ID by which a receiver knows an event that it has seen."""
    return f"evt_{blake2b(event.id.encode(), digest_size=12).hexdigest()}"


def sending_id(endpoint_id: str, webhook_id: str) -> str:
    """Return the ID of the record of one event and one endpoint."""
    return f"{endpoint_id}-{webhook_id}"


def body_of(event: Event) -> bytes:
    """Return what is sent: OpenAI's webhook event, with what else is known of it in `data`."""
    return msgspec.json.encode(
        {
            "id": webhook_id_of(event),
            "object": "event",
            "created_at": int(event.happened),
            "type": type_of(event),
            "timestamp": event.time,
            "data": {"id": event.subject, **event.data},
        }
    )
