"""A request's body: OpenAI's JSON, which goes through untouched, and the model that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.shared.errors import BadRequestError

Body = Mapping[str, Any] | bytes


class _Model(msgspec.Struct):
    model: str


def encoded(body: Body) -> bytes:
    """Return the JSON to publish; bytes stay as they are. Raises: BadRequestError for what JSON can't say."""
    if isinstance(body, bytes):
        return body
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequestError(f"the body must be what JSON can say: {error}") from None


def model_of(body: bytes) -> str:
    """Return the served model name; it decides on which subject a request goes. Raises: BadRequestError."""
    try:
        return msgspec.json.decode(body, type=_Model).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(
            f"the body must be a JSON object whose `model` is a served model name: {error}",
            param="model",
        ) from None
