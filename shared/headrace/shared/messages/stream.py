"""A request's token IDs on their way to an answer: what decode and derender say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.shared.messages.job import Job
from headrace.shared.messages.outcome import Failure, Status, Timings
from headrace.shared.messages.prompt import PromptLogprobs
from headrace.shared.wire import Message

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class OpenStream(Message, frozen=True, tag="open.v1"):
    """Claims a derender worker for one request: decode → the queue group `derender`."""

    stream_id: int
    """Names the stream between these two workers. Set by decode, never used twice in its life."""
    attempt: int
    """1 for the first claim; a later one replays every token ID from the start."""
    decode_instance: str
    """Where control messages for this stream go: `ctl.worker.<decode_instance>`."""
    job: Job
    """Prompt, parameters and body: all that the answer depends on."""
    epoch: int = 1
    """Which owner of the job sends: how often the job was delivered. Answers of two owners are never mixed."""
    first_seq: int = 0
    """Messages before this one were published for an earlier owner: made again, and not published. Set by decode."""
    keeps_entries: bool = False
    """Whether chunks carry their entries, so that the next owner can go on where this one ended. Set by decode."""
    hand_back: str = ""
    """Where the job is given back when this decode worker is lost: the ack subject of its delivery. Empty: nowhere."""


class StreamOpened(Message, frozen=True, tag="opened.v1"):
    """The claim is taken: derender → decode, as the reply."""

    derender_instance: str
    """Frames go to `frames.<derender_instance>`."""


class StreamRefused(Message, frozen=True, tag="refused.v1"):
    """The claim is not taken: derender → decode, as the reply."""

    derender_instance: str
    """Who refused."""
    failure: Failure
    """Why; retryable: another worker may take it."""


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step gave one choice. An array on the wire: it is most of the traffic."""

    stream_id: int
    """The stream."""
    index: int
    """Counts this stream's entries, from 0: the sequence number by which a loss is seen."""
    choice: int
    """The choice's index in the answer."""
    token_ids: bytes
    """Packed; may be empty in the last one of a choice."""
    finish_reason: FinishReason | None = None
    """Why the choice ended. None: it goes on."""
    stop_reason: int | str | None = None
    """The stop token ID that ended it. None: EOS, or not stopped."""
    logprobs: list[list[tuple[int, float, int | None]]] | None = None
    """One list a token ID: `[token_id, logprob, rank]` each, the sampled one first. None: not asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """Those of the choice's prompt, in the first entry of the prompt's first choice. None: another entry, or not
    asked for."""


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decode has sent all of a stream. Sent again until the derender worker says that it is done."""

    stream_id: int
    """The stream."""
    num_entries: int
    """How many `Tokens` the stream has: derender asks for what it lacks."""
    timings: Timings = Timings()
    """All that is known so far."""
    failure: Failure | None = None
    """The error with which the answer ends. None: every choice finished."""
    status: Status = "error"
    """The terminal's status when there is a failure."""


class Frame(Message, frozen=True, tag="frame.v1"):
    """All that one engine step gave the streams of one derender worker: decode → derender."""

    decode_instance: str
    """The sender."""
    seq: int
    """Counts this sender's frames to this receiver, from 1."""
    tokens: tuple[Tokens, ...] = ()
    """In the order of the steps."""
    ends: tuple[StreamEnd, ...] = ()
    """After the tokens."""


class Credit(Message, frozen=True, tag="credit.v1"):
    """Frames up to `seq` are worked off: derender → decode. Cumulative, so a lost one does no harm."""

    derender_instance: str
    """Who."""
    seq: int
    """The highest `Frame.seq` that was worked off."""


class Resync(Message, frozen=True, tag="resync.v1"):
    """Entries are missing: derender → decode, which sends them again from `index`."""

    stream_id: int
    """The stream."""
    index: int
    """How many entries arrived without a gap."""
    derender_instance: str = ""
    """Who asks: a worker that the stream has left is told so (`stream_gone.v1`). Empty: not said."""


class StopChoice(Message, frozen=True, tag="stop.v1"):
    """A stop string was found: derender → decode, which aborts the choice in the engine."""

    stream_id: int
    """The stream."""
    choice: int
    """The choice."""


class StreamDone(Message, frozen=True, tag="done.v1"):
    """The terminal is published: derender → decode, which acks the job."""

    stream_id: int
    """The stream."""


class StreamUnknown(Message, frozen=True, tag="unknown_stream.v1"):
    """Frames came for a stream that this worker does not hold: derender → decode, which claims another."""

    derender_instance: str
    """Who."""
    stream_id: int
    """The stream."""


class StreamGone(Message, frozen=True, tag="stream_gone.v1"):
    """The stream is not with this derender worker any more, or has ended: decode → derender, which drops it."""

    decode_instance: str
    """Who."""
    stream_id: int
    """The stream."""
