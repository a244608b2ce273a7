"""Which page of a list a client may ask for."""

from __future__ import annotations

import pytest

from headrace.gateway.paging import is_descending, limit_of
from headrace.shared.errors import BadRequestError


@pytest.mark.parametrize(
    ("query", "limit"), [({}, 20), ({"limit": "1"}, 1), ({"limit": "100"}, 100)]
)
def test_a_limit_within_the_bounds_is_taken(query: dict[str, str], limit: int) -> None:
    assert limit_of(query, 20, 100) == limit


@pytest.mark.parametrize("text", ["", "0", "101", "-1", "1.5", "ten", "9" * 5_000, "²"])
def test_another_limit_is_refused_with_the_bounds_named(text: str) -> None:
    with pytest.raises(BadRequestError, match="limit must be 1 to 100"):
        limit_of({"limit": text}, 20, 100)


def test_the_newest_come_first_unless_asked_otherwise() -> None:
    assert is_descending({})
    assert not is_descending({"order": "asc"})
    with pytest.raises(BadRequestError, match="asc or desc"):
        is_descending({"order": "newest"})
