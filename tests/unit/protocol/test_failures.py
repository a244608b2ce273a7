"""Each row of docs/failures.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEADER = (
    "| event | how it is noticed, and when | what the client sees | what recovers it | the test |"
)


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "failures.md").read_text().splitlines()
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in lines if line.startswith("|")]
    return [row for row in cells if row[0] not in ("event", "---")]


def names_of_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    found = (re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.M) for file in files)
    return {name for names in found for name in names}


def test_every_event_has_all_it_needs_and_names_a_test() -> None:
    assert len(rows()) > 20
    for row in rows():
        assert len(row) == HEADER.count("|") - 1, row
        assert all(row), row
        assert re.search(r"`test_\w+`", row[-1]), row


def test_every_test_that_is_named_exists() -> None:
    named = {name for row in rows() for name in re.findall(r"`(test_\w+)`", row[-1])}
    assert named - names_of_tests() == set()
