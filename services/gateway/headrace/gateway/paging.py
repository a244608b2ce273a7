"""The page of a list: which one a client wants, and what it gets, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.shared.errors import BadRequestError


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Return how many entries a page may have. Raises: BadRequestError."""
    text = query.get("limit")
    if text is None:
        return default
    # Its length first: Python itself refuses to read a number of thousands of digits.
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise BadRequestError(f"limit must be 1 to {most:,}, got {text[:64]!r}", param="limit")
    return int(text)


def is_descending(query: Mapping[str, str]) -> bool:
    """Return whether the newest entries come first. Raises: BadRequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequestError(f"order must be asc or desc, got {order[:64]!r}", param="order")
    return order == "desc"


def list_object(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return the object `list` with these entries."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
