"""The answer as whoever asked gets it: its parts, whose they are, and its end."""

from __future__ import annotations

from headrace.shared.messages.outcome import Status, Timings
from headrace.shared.messages.stream import Tokens
from headrace.shared.wire import Message


class Chunk(Message, frozen=True, tag="chunk.v1"):
    """A part of a streamed answer: derender → the edge."""

    request_id: str
    """The request."""
    seq: int
    """Counts the messages of this answer, from 0."""
    chunks: tuple[bytes, ...]
    """OpenAI chunk objects as JSON, one an SSE event."""
    epoch: int = 1
    """Whose answer it is a part of (`OpenStream.epoch`). It counts unless a later owner's takeover voids it."""
    entries: tuple[Tokens, ...] = ()
    """What was fed since the chunk before, in the same cuts, so that another owner can go on from here. Empty: it
    could not (`OpenStream.keeps_entries`)."""


class Takeover(Message, frozen=True, tag="takeover.v1"):
    """A new owner answers from here on: decode → whoever reads the answer, and the workers that hold the request.

    Chunks of older epochs count up to `seq`, and from there on none does, nor an older epoch's terminal, in
    whatever order they come: the broker stores a takeover only behind the last message that its sender has read.
    """

    request_id: str
    """The request."""
    tenant: str
    """Its tenant."""
    epoch: int
    """The new owner's."""
    seq: int
    """How many messages of this answer were there before, and count. 0: the answer starts anew."""
    decode_instance: str
    """The new owner."""


class Terminal(Message, frozen=True, tag="terminal.v1"):
    """The one end of a request: whichever stage ends it → the edge."""

    request_id: str
    """The request."""
    seq: int
    """The number after the last chunk's; 0 when there were none."""
    status: Status
    """How it ended."""
    http_status: int
    """Status of an answer of which nothing was sent yet."""
    body: bytes = b""
    """JSON: the whole answer, or OpenAI's error body. Empty after a stream that ended well."""
    retry_after_s: float | None = None
    """When to try again. None: no advice."""
    epoch: int = 0
    """Whose end it is (`OpenStream.epoch`). 0: no owner's, and no takeover voids it."""
    timings: Timings = Timings()
    """Where the time went."""
    result: bytes = b""
    """JSON: the response that a stream of the Responses API ended with. On `res` alone; else empty."""
