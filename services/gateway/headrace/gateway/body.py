"""The request body: read within a limit, and parsed no further than the gateway needs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace.gateway.errors import BodyTimeoutError, InvalidBodyError
from headrace.shared.deadlines import FIELD, timeout_s
from headrace.shared.errors import PayloadTooLargeError

MAX_INPUT_CHARS = 200  # of a wrong value that an error repeats

_TRUE = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE = frozenset({"false", "f", "no", "n", "off", "0"})


class _Fields(msgspec.Struct):
    model: Any = None
    stream: Any = None
    request_timeout: Any = None


_decoder = msgspec.json.Decoder(_Fields)


class RequestFields(msgspec.Struct, frozen=True):
    """What the gateway needs to know of a body."""

    model: str | None
    """Served model name. None or empty: not named."""
    stream: bool
    """Whether the answer goes out in chunks."""
    timeout_s: float | None = None
    """Until the deadline. None: not named."""


async def read_body(
    parts: AsyncIterator[bytes],
    content_length: str | None,
    *,
    max_bytes: int,
    timeout_s: float,
    setting: str | None = None,
) -> bytes:
    """Return the whole body. `setting`: the one that lifts the limit; None: none does.

    Raises: PayloadTooLargeError as soon as it is seen to exceed `max_bytes`; BodyTimeoutError.
    """
    if content_length is not None and content_length.isdecimal():
        _check_size(int(content_length), max_bytes, setting)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in parts:
                body += part
                _check_size(len(body), max_bytes, setting)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the request body did not arrive within {timeout_s:g} s; {len(body):,} bytes did"
        ) from None
    return bytes(body)


def _check_size(size: int, max_bytes: int, setting: str | None) -> None:
    if size > max_bytes:
        raise PayloadTooLargeError(
            f"the request body has {size:,} bytes or more; the limit is {max_bytes:,} bytes"
            + (f" (setting {setting})" if setting else "")
        )


def parse_body(body: bytes, content_type: str) -> RequestFields:
    """Return model, stream flag and timeout; all else is left to render.

    Raises: InvalidBodyError, worded as vLLM's server words it; BadRequestError for a wrong timeout.
    """
    fields = _parse(body, content_type)
    seconds = fields.request_timeout
    return RequestFields(
        model=_model(fields),
        stream=as_bool(fields.stream, "stream"),
        timeout_s=None if seconds is None else timeout_s(seconds, FIELD),
    )


def model_of(body: bytes, content_type: str) -> str | None:
    """Return the model that a question names; all else is left to the worker. Raises: as `parse_body`."""
    return _model(_parse(body, content_type))


def _parse(body: bytes, content_type: str) -> _Fields:
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed")
    if not body:
        raise _invalid(_entry("missing", "body", "Field required", None), param="body")
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, RecursionError) as error:
        raise _json_error(body, error) from None
    try:
        value = msgspec.json.decode(body)
    except (
        msgspec.DecodeError,
        RecursionError,
    ) as error:  # the first look stopped before this place
        raise _json_error(body, error) from None
    raise _not_an_object(value)


def _model(fields: _Fields) -> str | None:
    if fields.model is not None and not isinstance(fields.model, str):
        raise _invalid(
            _entry("string_type", "body.model", "Input should be a valid string", fields.model),
            param="body.model",
        )
    return fields.model or None


def as_bool(value: object, name: str) -> bool:
    """Return the field `name` as pydantic, and so vLLM, understands a boolean: also `1`, `"true"`, `"off"`.

    Raises: InvalidBodyError for what it does not understand.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    word = value.lower() if isinstance(value, str) else str(value)
    if isinstance(value, str | int | float) and word.removesuffix(".0") in _TRUE | _FALSE:
        return word.removesuffix(".0") in _TRUE
    kind, hint = "bool_type", ""
    if isinstance(value, str | int | float):
        kind, hint = "bool_parsing", ", unable to interpret input"
    raise _invalid(
        _entry(kind, f"body.{name}", f"Input should be a valid boolean{hint}", value),
        param=f"body.{name}",
    )


def _not_an_object(value: object) -> InvalidBodyError:
    if value is None:
        return _invalid(_entry("missing", "body", "Field required", None), param="body")
    message = "Input should be a valid dictionary or object to extract fields from"
    return _invalid(_entry("model_attributes_type", "body", message, value), param="body")


def _json_error(body: bytes, error: Exception) -> InvalidBodyError:
    """Return the error with the position that Python's own parser finds, as vLLM's server does."""
    position, reason = 0, str(error)
    try:
        json.loads(body)
    except json.JSONDecodeError as found:
        position, reason = found.pos, found.msg
    except RecursionError:
        return InvalidBodyError(
            f"the JSON is nested too deeply: {sys.getrecursionlimit():,} levels at most"
        )
    except ValueError:  # no text: the first parser said so
        return InvalidBodyError("There was an error parsing the body")
    loc = f"body.{position}"
    detail = _entry("json_invalid", loc, "JSON decode error", {}) | {"ctx": {"error": reason}}
    return _invalid(detail, param=loc)


def _entry(kind: str, loc: str, msg: str, value: object) -> dict[str, object]:
    return {"type": kind, "loc": loc, "msg": msg, "input": _summary(value)}


def _summary(value: object) -> str:
    """Return what the client sent in the form, and up to the length, in which vLLM sends it back."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= MAX_INPUT_CHARS else text[:MAX_INPUT_CHARS] + "...[truncated]"


def _invalid(detail: object, *, param: str | None = None) -> InvalidBodyError:
    return InvalidBodyError(f"1 validation error:\n  {detail}", param=param)
