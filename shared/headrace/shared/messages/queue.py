"""What is noted of queued messages that were not simply worked off."""

from __future__ import annotations

from headrace.shared.subjects import Role
from headrace.shared.wire import Message


class Returned(Message, frozen=True, tag="returned.v1"):
    """A queued message was given back unharmed: the worker that had it → those that get it next."""

    num_returns: int
    """How often, this time included."""


class DeadLetter(Message, frozen=True, tag="dead_letter.v1"):
    """A message that a stage could not read, or gave up on, kept for a person to look at."""

    stage: Role
    """Which stage."""
    reason: str
    """Why."""
    subject: str
    """The subject it came on."""
    headers: dict[str, str]
    """Its headers."""
    payload: bytes
    """Its bytes, as they came."""
    num_delivered: int
    """How often it was delivered."""
