"""One message, as whoever subscribed to it or reads it back has it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Received(msgspec.Struct, frozen=True):
    """One message, with its payload whole, however it was carried."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]  #: none is an empty mapping
    reply: str  #: where an answer goes; empty: none is awaited
