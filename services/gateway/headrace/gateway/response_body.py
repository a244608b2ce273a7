"""A request of the Responses API that is to be stored: what it asks for, and what of it the pipeline gets."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.body import as_bool
from headrace.shared.errors import BadRequestError

_OURS = ("background", "store", "previous_response_id")


class ResponseRequest(msgspec.Struct, kw_only=True, frozen=True):
    """The fields that are the gateway's business, and all of them."""

    background: bool
    """Whether it is to be worked on while nobody waits."""
    store: bool
    """Whether it can be asked for later."""
    previous_response_id: str | None
    """The response that it goes on from."""
    fields: dict[str, Any]
    """The whole body."""


def read(body: bytes) -> ResponseRequest | None:
    """Return the request; None: nothing in it is the gateway's business, and the body goes on as it came.

    Raises: BadRequestError, also for a background response that may not be stored.
    """
    if not any(name.encode() in body for name in _OURS):
        return None
    try:
        fields: dict[str, Any] = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"the body can't be read: {error}") from None
    background = as_bool(fields.get("background"), "background")
    store = fields.get("store")
    is_stored = as_bool(store, "store")
    previous = fields.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise BadRequestError("previous_response_id must be a string", param="previous_response_id")
    if background and store is not None and not is_stored:
        raise BadRequestError(
            "a background response is stored: leave `store` out, or send true", param="store"
        )
    if not (background or is_stored or previous):
        return None
    return ResponseRequest(
        background=background,
        store=background or is_stored,
        previous_response_id=previous or None,
        fields=fields,
    )


def for_pipeline(
    request: ResponseRequest, response_id: str | None, history: list[dict[str, Any]]
) -> bytes:
    """Return the body that the pipeline gets: the whole conversation, and the response's ID."""
    fields = {name: value for name, value in request.fields.items() if name not in _OURS}
    if response_id is not None:
        fields["request_id"] = response_id
    if request.previous_response_id is not None:
        fields["input"] = [*history, *items_of(fields.get("input"))]
    return msgspec.json.encode(fields)


def items_of(given: Any) -> list[Any]:
    """Return an `input` as a list of items. Raises: BadRequestError."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if isinstance(given, list):
        return given
    raise BadRequestError("input must be a string or a list of items", param="input")


def listed_items(given: Any, response_id: str) -> list[dict[str, Any]]:
    """Return the items of an `input` as OpenAI lists them, each with an ID. Raises: BadRequestError."""
    listed = []
    for index, item in enumerate(items_of(given)):
        if not isinstance(item, dict):
            continue
        shown: dict[str, Any] = {
            "id": f"msg_{response_id.removeprefix('resp_')}_{index}",
            "type": "message",
        } | item
        if shown["type"] == "message":
            shown.setdefault("status", "completed")
            if isinstance(shown.get("content"), str):
                kind = "output_text" if shown.get("role") == "assistant" else "input_text"
                shown["content"] = [{"type": kind, "text": shown["content"]}]
        listed.append(shown)
    return listed
