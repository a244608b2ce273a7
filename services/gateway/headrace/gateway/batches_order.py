"""What a client says when it creates a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from headrace.gateway.errors import InvalidBodyError
from headrace.gateway.files import expires_after_s
from headrace.shared.batches import BatchEndpoint
from headrace.shared.errors import BadRequestError

MAX_WINDOW_S = 30 * 86_400
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WINDOW = re.compile(r"(?:[0-9]{1,9}[smhd])+")


class BatchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is to be made."""

    input_file_id: str
    """Whether there is such a file is not looked at yet."""
    endpoint: BatchEndpoint
    """Of every line."""
    completion_window: str
    """As the client says it."""
    window_s: int
    """The same in seconds, from the batch's creation."""
    metadata: dict[str, str] | None
    """The client's own. None: none was sent."""
    output_expires_after_s: int | None
    """For how long its output is kept, from when it begins to be written. None: until it is deleted."""


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; an empty one has none. Raises: InvalidBodyError when it is no JSON object."""
    try:
        fields = msgspec.json.decode(body) if body.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBodyError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidBodyError(f"the body must be a JSON object, got {type(fields).__name__}")
    return fields


def order_of(fields: Mapping[str, Any]) -> BatchOrder:
    """Return what the fields of a body ask for. Raises: BadRequestError naming the field that is wrong."""
    window = _text(fields, "completion_window")
    endpoint = _text(fields, "endpoint")
    known: tuple[BatchEndpoint, ...] = get_args(BatchEndpoint)
    for name in known:
        if endpoint == name:
            break
    else:
        raise BadRequestError(
            f"the endpoint must be one of {', '.join(known)}, got {endpoint[:64]!r}",
            param="endpoint",
        )
    return BatchOrder(
        input_file_id=_text(fields, "input_file_id"),
        endpoint=name,
        completion_window=window,
        window_s=window_s(window),
        metadata=metadata_of(fields.get("metadata")),
        output_expires_after_s=_output_expires_after_s(fields.get("output_expires_after")),
    )


def window_s(text: str) -> int:
    """Return the seconds of a completion window, as `24h` or `1h30m`. Raises: BadRequestError."""
    seconds = 0
    if _WINDOW.fullmatch(text):
        pieces = re.findall(r"([0-9]+)([smhd])", text)
        seconds = sum(int(number) * _UNITS_S[unit] for number, unit in pieces)
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise BadRequestError(
            "the completion window must be a number with s, m, h or d, as '24h' or '90s', up to "
            f"{MAX_WINDOW_S // 86_400} days; got {text[:64]!r}",
            param="completion_window",
        )
    return seconds


def metadata_of(value: object) -> dict[str, str] | None:
    """Return metadata that is as OpenAI allows it. Raises: BadRequestError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequestError("metadata must be an object of strings", param="metadata")
    if len(value) > MAX_METADATA:
        raise BadRequestError(
            f"metadata may have {MAX_METADATA} keys, got {len(value)}", param="metadata"
        )
    for key, text in value.items():
        if len(key) > MAX_KEY_CHARS:
            raise BadRequestError(
                f"a key of metadata may have {MAX_KEY_CHARS} characters, got {len(key)}",
                param="metadata",
            )
        if not isinstance(text, str) or len(text) > MAX_VALUE_CHARS:
            raise BadRequestError(
                f"a value of metadata must be a string of up to {MAX_VALUE_CHARS} characters",
                param=f"metadata.{key}",
            )
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise BadRequestError(f"Missing required parameter: '{name}'", param=name)
    if not isinstance(value, str):
        raise BadRequestError(f"'{name}' must be a string, got {type(value).__name__}", param=name)
    return value


def _output_expires_after_s(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequestError(
            "output_expires_after must be an object", param="output_expires_after"
        )
    return expires_after_s(value.get("anchor"), value.get("seconds"), "output_expires_after")
