"""One question to one server, and all of its answer that a client can see."""

from __future__ import annotations

import json
from typing import Any

import httpx

from .cases import Case

DONE = "[DONE]"

Answer = dict[str, Any]
"""`status`, `content_type`, and `body` or `events`: the data of each server-sent event, parsed."""


class FramingError(Exception):
    """A stream that is no sequence of `data:` events ending in `[DONE]`."""


def ask(client: httpx.Client, case: Case, *, stream: bool) -> Answer:
    """Ask a case, whole or streamed."""
    mode = "streamed" if stream else "whole"
    own = {name: value.format(mode=mode) for name, value in case.headers.items()}
    headers = {"content-type": "application/json", **own}
    reply = client.request(
        case.method, f"/v1/{case.path}", content=_content(case, stream), headers=headers
    )
    answer: Answer = {
        "status": reply.status_code,
        "content_type": reply.headers.get("content-type", ""),
    }
    if answer["content_type"].startswith("text/event-stream"):
        answer["events"] = events_of(reply.text)
    else:
        answer["body"] = reply.json() if reply.content else None
    return answer


def _content(case: Case, stream: bool) -> str:
    if isinstance(case.body, str):
        return case.body
    body = dict(case.body)
    if stream:
        body["stream"] = True
    elif case.streams:
        body.pop("stream_options", None)  # refused where nothing is streamed
    return json.dumps(body)


def events_of(text: str) -> list[Any]:
    """Return the data of each event.

    Raises: FramingError when the text is anything but `data:` lines with a blank line after each, or has no end.
    """
    if not text.endswith("\n\n"):
        raise FramingError(f"the stream ends in {text[-40:]!r}, not in a blank line")
    events: list[Any] = []
    for event in text[:-2].split("\n\n"):
        if not event.startswith("data: ") or "\n" in event:
            raise FramingError(
                f"an event is one line that starts with 'data: ', not {event[:80]!r}"
            )
        data = event.removeprefix("data: ")
        events.append(data if data == DONE else json.loads(data))
    if events.count(DONE) != 1 or events[-1] != DONE:
        raise FramingError("[DONE] is not the last event, and there but once")
    return events
