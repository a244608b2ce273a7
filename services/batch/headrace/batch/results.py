"""What a request's end is in the files of its batch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.shared.batch_results import Line, answered, encoded
from headrace.shared.batches import CANCELLED_CODE, EXPIRED_CODE, BatchUsage
from headrace.shared.messages import Terminal

NO_USAGE = BatchUsage()
SWEPT = {
    EXPIRED_CODE: "This request could not be executed before the completion window expired.",
    CANCELLED_CODE: "This request was not finished when its batch was cancelled.",
}
TOO_LARGE_CODE = "result_too_large"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One line of one of a batch's files."""

    data: bytes  #: with its line end
    is_ok: bool  #: which of the two files it belongs to
    usage: BatchUsage = NO_USAGE
    swept: str = ""  #: of a line that was not finished: why. Empty: it was


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_bodies = msgspec.json.Decoder(_Body)


class _Error(msgspec.Struct):
    code: str
    message: str


def of_terminal(terminal: Terminal, custom_id: str) -> Outcome:
    """Return the outcome of a request that has ended by itself."""
    data = answered(terminal.request_id, custom_id, terminal.body, status_code=terminal.http_status)
    is_ok = terminal.status == "ok"
    usage = usage_of(terminal.body) if is_ok else NO_USAGE
    return Outcome(data=data + b"\n", is_ok=is_ok, usage=usage)


def of_code(request_id: str, custom_id: str, code: str, message: str = "") -> Outcome:
    """Return the outcome of a request that has no answer for a reason of the batch's own."""
    error = _Error(code, message or SWEPT[code])
    line = Line(request_id, custom_id, None, msgspec.Raw(msgspec.json.encode(error)))
    return Outcome(data=encoded(line) + b"\n", is_ok=False, swept=code if code in SWEPT else "")


def too_large(request_id: str, custom_id: str, num_bytes: int, max_bytes: int) -> Outcome:
    """Return the outcome of a request whose answer fits into no part of a file."""
    message = f"the answer's line has {num_bytes:,} bytes, and at most {max_bytes:,} can be stored"
    return of_code(request_id, custom_id, TOO_LARGE_CODE, message)


def usage_of(body: bytes) -> BatchUsage:
    """Return the usage that an answer states; none where it states none."""
    try:
        found = _bodies.decode(body).usage
    except msgspec.DecodeError:
        return NO_USAGE
    if found is None:
        return NO_USAGE
    of_input = found.input_tokens_details or found.prompt_tokens_details or _InputDetails()
    of_output = found.output_tokens_details or found.completion_tokens_details or _OutputDetails()
    return BatchUsage(
        input_tokens=found.input_tokens or found.prompt_tokens or 0,
        cached_tokens=of_input.cached_tokens or 0,
        output_tokens=found.output_tokens or found.completion_tokens or 0,
        reasoning_tokens=of_output.reasoning_tokens or 0,
    )


def add(one: BatchUsage, other: BatchUsage) -> BatchUsage:
    """Return the sum."""
    return BatchUsage(
        input_tokens=one.input_tokens + other.input_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        reasoning_tokens=one.reasoning_tokens + other.reasoning_tokens,
    )
