"""Every message of the pipeline, by what it is about.

Each field says what it means, its unit or length, what None means, and who sets it. Token IDs are packed
little-endian uint32 (`token_ids.pack`). Times are Unix seconds, UTC, as float; durations are seconds.
"""

from headrace.shared.messages.answer import Chunk, Takeover, Terminal
from headrace.shared.messages.ask import Ask, AskAnswer, DerenderAsk, RenderAsk
from headrace.shared.messages.control import AskOwner, Cancel, Owner
from headrace.shared.messages.job import Endpoint, Job
from headrace.shared.messages.outcome import Failure, Status, Timings
from headrace.shared.messages.prefill import (
    Handoff,
    Handshake,
    PrefillFailed,
    PrefillNoted,
    PrefillStarted,
    PrefillTask,
)
from headrace.shared.messages.prompt import Prompt, PromptLogprobs
from headrace.shared.messages.queue import DeadLetter, Returned
from headrace.shared.messages.stream import (
    Credit,
    FinishReason,
    Frame,
    OpenStream,
    Resync,
    StopChoice,
    StreamDone,
    StreamEnd,
    StreamGone,
    StreamOpened,
    StreamRefused,
    StreamUnknown,
    Tokens,
)
from headrace.shared.messages.worker import Heartbeat, LevelName, LogLevel, Ping, Pong, RollCall

__all__ = [
    "Ask",
    "AskAnswer",
    "AskOwner",
    "Cancel",
    "Chunk",
    "Credit",
    "DeadLetter",
    "DerenderAsk",
    "Endpoint",
    "Failure",
    "FinishReason",
    "Frame",
    "Handoff",
    "Handshake",
    "Heartbeat",
    "Job",
    "LevelName",
    "LogLevel",
    "OpenStream",
    "Owner",
    "Ping",
    "Pong",
    "PrefillFailed",
    "PrefillNoted",
    "PrefillStarted",
    "PrefillTask",
    "Prompt",
    "PromptLogprobs",
    "RenderAsk",
    "Resync",
    "Returned",
    "RollCall",
    "Status",
    "StopChoice",
    "StreamDone",
    "StreamEnd",
    "StreamGone",
    "StreamOpened",
    "StreamRefused",
    "StreamUnknown",
    "Takeover",
    "Terminal",
    "Timings",
    "Tokens",
]
