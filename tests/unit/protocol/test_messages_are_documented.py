"""docs/protocol.md says all of the messages, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from headrace.shared import messages

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
STRUCTS = [
    value
    for value in vars(messages).values()
    if isinstance(value, type)
    and issubclass(value, msgspec.Struct)
    and value.__module__.startswith(messages.__name__)
]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_message_and_every_field_has_a_docstring(
    struct: type[msgspec.Struct], tables: ModuleType
) -> None:
    assert struct.__doc__
    found = {field.name: field.doc for field in tables.fields_of(struct.__name__)}
    assert list(found) == list(struct.__struct_fields__)
    assert [name for name, doc in found.items() if not doc.endswith(".")] == []


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_struct_has_its_part_of_the_document(struct: type[msgspec.Struct]) -> None:
    tag = struct.__struct_config__.tag
    part = re.search(
        rf"<!-- generated:{tag or struct.__name__} -->\n(.*?)<!-- /generated -->",
        DOCUMENT.read_text(),
        re.DOTALL,
    )
    assert part is not None
    rows = re.findall(r"^\| `(\w+)` \|", part[1], re.MULTILINE)
    assert rows == list(struct.__struct_fields__)


def test_the_document_is_up_to_date(tables: ModuleType) -> None:
    text = DOCUMENT.read_text()
    assert tables.generated(text) == text, "run scripts/protocol_tables.py"


def test_a_marker_of_nothing_is_refused_by_name(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"nothing makes 'job\.v9'; there are words"):
        tables.generated("<!-- generated:job.v9 -->\n<!-- /generated -->\n")


def test_a_changed_field_makes_the_document_stale(tables: ModuleType) -> None:
    text = DOCUMENT.read_text().replace("| `deadline` | `float` |", "| `deadline` | `int` |")
    assert text != DOCUMENT.read_text()
    assert tables.generated(text) != text


def test_what_a_receiver_reads_are_fields_of_that_message(tables: ModuleType) -> None:
    known = {name for struct in STRUCTS for name in struct.__struct_fields__}
    for tag, kind in tables.message_types().items():
        after = DOCUMENT.read_text().partition(f"<!-- generated:{tag} -->")[2]
        told = after.partition("<!-- /generated -->")[2].partition("\n#")[0]
        reads = re.search(r"\*\*[\w, ]+ reads?\*\*(.*?)\.(?:\s|$)", told, re.DOTALL)
        names = {
            name for name in re.findall(r"`(\w+)`", reads[1] if reads else "") if name in known
        }
        assert names <= set(kind.__struct_fields__), tag
