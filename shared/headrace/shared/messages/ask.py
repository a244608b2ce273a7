"""Questions that one worker answers at once, without an engine."""

from __future__ import annotations

from typing import Literal

from headrace.shared.wire import Message

RenderAsk = Literal["tokenize", "detokenize", "chat.completions.render", "completions.render"]
DerenderAsk = Literal["chat.completions.derender", "completions.derender"]


class Ask(Message, frozen=True, tag="ask.v1"):
    """A question that one worker answers at once, without an engine: edge → one render or derender worker."""

    request_id: str
    """Names the question in logs, and in an answer that has an ID."""
    tenant: str
    """Whose question it is."""
    endpoint: RenderAsk | DerenderAsk
    """Which endpoint the body is for; render and derender each refuse the other's."""
    deadline: float
    """After this nobody waits for the answer (Unix seconds)."""
    body: bytes
    """The client's own JSON, untouched."""
    is_own_id: bool = False
    """As in the job."""


class AskAnswer(Message, frozen=True, tag="answer.v1"):
    """The answer to an `ask.v1`: one render or derender worker → the edge, as the reply."""

    http_status: int
    """200, or that of the error."""
    body: bytes
    """JSON: the whole answer, or OpenAI's error body."""
    retry_after_s: float | None = None
    """When to try again. None: no advice."""
