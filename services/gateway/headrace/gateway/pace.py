"""How long the gateway waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """All in seconds; tests make them short."""

    silence_s: float = (
        2.0  #: without a message, until what was captured is read; doubles up to the next
    )
    max_silence_s: float = (
        16.0  #: a long queue must not make every waiting request read all the time
    )
    grace_s: float = 1.0  #: past the deadline, for the pipeline's own terminal
    cancel_wait_s: float = 2.0  #: for a cancelled response to end, before it is shown as it is
    cancel_poll_s: float = 0.05  #: between two looks whether it has
    cancel_interval_s: float = 1.0  #: a cancel is repeated: the job may still wait in a queue
    body_timeout_s: float = 60.0  #: for a request's body; of an upload, for its next piece
    upload_timeout_s: float = 3_600.0  #: for a file, to its last byte
    sweep_s: float = 3_600.0  #: between two looks for files that are past their time
    ask_timeout_s: float = 50.0  #: for a question; under a minute, for which a worker may reply
