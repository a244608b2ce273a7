from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headrace.shared.log_level import CHATTY, set_level


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in ("", CHATTY)}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_what_is_less_grave_than_the_level_is_not_written(level: str) -> None:
    set_level(level)
    ours = logging.getLogger("headrace.decode")
    written = [
        name
        for name in ("debug", "info", "warning", "error")
        if ours.isEnabledFor(logging.getLevelName(name.upper()))
    ]
    assert written[0] == level


def test_requests_of_our_own_are_written_only_while_debugging() -> None:
    for level, is_written in (("info", False), ("debug", True), ("warning", False)):
        set_level(level)
        assert logging.getLogger(CHATTY).isEnabledFor(logging.INFO) is is_written
