"""Words about one request to the workers that hold it."""

from __future__ import annotations

from headrace.shared.wire import Message


class Cancel(Message, frozen=True, tag="cancel.v1"):
    """Stop this request wherever it is: edge → every worker that may hold it."""

    request_id: str
    """The request."""
    tenant: str
    """Its tenant; must match."""
    reason: str
    """A short phrase, as `client disconnected`."""


class AskOwner(Message, frozen=True, tag="ask_owner.v1"):
    """Is this request in your hands? A request: decode → one other decode worker."""

    request_id: str
    """The request."""
    tenant: str
    """Its tenant."""


class Owner(Message, frozen=True, tag="owner.v1"):
    """The answer to that: a decode worker → the one that asked, as the reply."""

    is_owner: bool
    """Whether it is answering the request, and will end it."""
