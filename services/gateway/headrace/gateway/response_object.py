"""The response object of a stored response, made of its record and its end."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.shared.messages import Terminal

ResponseStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]
GRACE_S = 5.0  # past the deadline, for the pipeline's own word


class StoredResponse(msgspec.Struct, kw_only=True, frozen=True):
    """A response that can be asked for later. How it ended stands in its terminal, on `res`."""

    response_id: str
    """Names it, and its request in the pipeline."""
    model: str
    """Served model name."""
    created: float
    """When it was accepted (Unix seconds)."""
    deadline: float
    """After this it fails (Unix seconds)."""
    background: bool
    """Whether it is worked on while nobody waits."""
    stream: bool
    """Whether it was asked for as a stream."""
    store: bool = True
    """Whether it can be asked for later."""
    previous_response_id: str | None = None
    """The response that it goes on from."""
    has_started: bool = False
    """Whether an engine works on it, or did."""
    is_cancelled: bool = False
    """Whether its caller has cancelled it."""
    body: msgspec.Raw = msgspec.Raw(b"null")
    """What the pipeline was given. Null: it is large, and stands in `blob`."""
    blob: str | None = None
    """Where the body is. None: here."""


def is_gone(
    record: StoredResponse, terminal: Terminal | None, *, now: float, kept_s: float
) -> bool:
    """Whether the time is over for which it is kept."""
    if terminal is None:  # a result is kept no longer than from its end
        return now > record.deadline + GRACE_S and now > record.created + kept_s
    took_s = terminal.timings.total_s or 0.0
    return now > record.created + took_s + kept_s


def response_of(
    record: StoredResponse, fields: dict[str, Any], terminal: Terminal | None, *, now: float
) -> dict[str, Any]:
    """Return the object as OpenAI's API shows it; `fields` is the body."""
    if terminal is None:
        if record.is_cancelled:
            return _unfinished(record, fields, "cancelled")
        if now > record.deadline + GRACE_S:
            error = _error("server_error", "the response was not made by its deadline")
            return _unfinished(record, fields, "failed", error)
        return _unfinished(record, fields, "in_progress" if record.has_started else "queued")
    if terminal.status == "ok":
        whole = terminal.result or terminal.body
        if whole:
            return dressed(record, msgspec.json.decode(whole), terminal)
        return _unfinished(record, fields, "failed", _error("server_error", "its text is gone"))
    return failed_response(record, fields, terminal.http_status, terminal.body)


def failed_response(
    record: StoredResponse, fields: dict[str, Any], http_status: int, body: bytes
) -> dict[str, Any]:
    """Return the object of a response that ended with an error; `body` is OpenAI's error body."""
    if http_status == 499:
        return _unfinished(record, fields, "cancelled")
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(http_status, "server_error")
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        message = "the response failed without a reason"
    return _unfinished(record, fields, "failed", _error(code, message))


def queued_response(record: StoredResponse, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a response that was just accepted."""
    return _unfinished(record, fields, "queued")


def dressed(
    record: StoredResponse, response: dict[str, Any], terminal: Terminal | None = None
) -> dict[str, Any]:
    """Return the pipeline's object with what only the gateway knows."""
    ours: dict[str, Any] = {
        "background": record.background,
        "store": record.store,
        "previous_response_id": record.previous_response_id,
        "created_at": int(record.created),
    }
    took_s = None if terminal is None else terminal.timings.total_s
    if response.get("status") == "completed" and took_s is not None:
        ours["completed_at"] = int(record.created + took_s)
    return {"error": None} | response | ours


def _error(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}


def _unfinished(
    record: StoredResponse,
    fields: dict[str, Any],
    status: ResponseStatus,
    error: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return an object without output; what was asked for is repeated, with OpenAI's defaults."""
    base: dict[str, Any] = {
        "id": record.response_id,
        "object": "response",
        "status": status,
        "model": record.model,
        "output": [],
        "error": error,
        "incomplete_details": None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata"),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "reasoning": fields.get("reasoning"),
        "temperature": fields.get("temperature", 1.0),
        "text": fields.get("text"),
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools") or [],
        "top_p": fields.get("top_p", 1.0),
        "truncation": fields.get("truncation", "disabled"),
        "usage": None,
        "user": fields.get("user"),
    }
    return dressed(record, base)
