"""One message, as whoever subscribed to it or reads it back has it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from nats.aio.msg import Msg


class Received(msgspec.Struct, frozen=True):
    """One message, with its payload whole, however it was carried."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]  #: none is an empty mapping
    reply: str  #: where an answer goes; empty: none is awaited


def status_of(message: Msg) -> str | None:
    """Return the three digits of a status message, or None for any other message."""
    return (message.headers or {}).get("Status")


def description_of(message: Msg) -> str:
    """Return what a status message says."""
    headers = message.headers or {}
    return f"{headers.get('Status', '')} {headers.get('Description', '')}".strip()
