"""The other documents: their links lead somewhere, their numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
OPERATIONS = ROOT / "docs" / "operations.md"
DOCUMENTS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "services").glob("*/README.md")),
    ROOT / "client" / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "CHANGELOG.md",
]
WIDTH = 140


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def follow_one_request() -> list[str]:
    section = ARCHITECTURE.read_text().partition("## Follow one request")[2].partition("\n## ")[0]
    return re.findall(r"^(\d+)\. (.+(?:\n   .+)*)$", section, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_prose_fits_the_width(document: Path) -> None:
    # a row of a table, a link's line of the module map and an example can't be broken
    text = re.sub(r"<!-- generated.*?/generated -->", "", document.read_text(), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_one_request_is_followed_in_eight_lines_that_each_link_a_file() -> None:
    lines = follow_one_request()
    assert [number for number, _ in lines] == [str(n) for n in range(1, 9)]
    for _, line in lines:
        assert re.search(r"\]\(\.\./\S+\.py\)", line)


def test_the_module_map_is_up_to_date(module_map: ModuleType) -> None:
    text = ARCHITECTURE.read_text()
    assert module_map.generated(text) == text, "run scripts/module_map.py"


def test_what_enforces_an_invariant_is_in_the_file_that_is_named() -> None:
    section = ARCHITECTURE.read_text().partition("## Invariants")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ")[-1] for line in section.splitlines()]
    named = re.findall(
        r"`(\w+)` (?:in|of) ((?:\[[^\]]+\]\([^)]+\)(?:, | and )?)+)", "\n".join(cells)
    )
    assert len(named) > 5
    for name, links in named:
        for target in re.findall(r"\]\(\.\./([^)]+)\)", links):
            assert re.search(rf"\b{name}\b", (ROOT / target).read_text()), (name, target)


def test_the_log_actions_that_operations_names_are_logged_somewhere() -> None:
    section = OPERATIONS.read_text().partition("| action | who |")[2].partition("\n\n")[0]
    actions = {
        action
        for line in section.splitlines()[1:]
        for action in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    code = "\n".join(
        file.read_text()
        for root in ("cli", "services", "shared")
        for file in (ROOT / root).rglob("*.py")
    )
    assert len(actions) > 10
    # the states of a worker are put into one f-string
    assert {a for a in actions if f'"{a}"' not in code} <= {"worker_ready", "worker_draining"}


@pytest.mark.parametrize("adr", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=name_of)
def test_a_decision_has_its_context_and_its_consequences(adr: Path) -> None:
    headings = re.findall(r"^## (.+)$", adr.read_text(), re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]
