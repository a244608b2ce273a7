"""The bytes of every message type: a change of them is a change of the protocol."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from headrace.shared import messages, wire
from headrace.shared.wire import Message

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TYPES = {
    wire.tag_of(kind): kind
    for kind in vars(messages).values()
    if inspect.isclass(kind) and issubclass(kind, Message) and kind is not Message
}
EMPTY_BY_DESIGN: tuple[object, ...] = (None, (), {}, b"", "", 0)


def read(tag: str) -> tuple[Message, bytes]:
    message = msgspec.json.decode((GOLDEN / f"{tag}.json").read_bytes(), type=TYPES[tag])
    return message, (GOLDEN / f"{tag}.msgpack").read_bytes()


def test_every_message_type_has_its_golden_files_and_no_file_is_left_over() -> None:
    expected = {f"{tag}.{kind}" for tag in TYPES for kind in ("json", "msgpack")}
    assert {path.name for path in GOLDEN.iterdir()} == expected


@pytest.mark.parametrize("tag", TYPES)
def test_a_message_is_encoded_to_exactly_these_bytes(tag: str) -> None:
    message, data = read(tag)
    assert wire.encode(message) == data


@pytest.mark.parametrize("tag", TYPES)
def test_these_bytes_are_decoded_to_that_message(tag: str) -> None:
    message, data = read(tag)
    assert wire.decode(data, *TYPES.values()) == message


@pytest.mark.parametrize("tag", TYPES)
def test_a_golden_message_sets_every_field(tag: str) -> None:
    message, data = read(tag)
    sent = msgspec.msgpack.decode(data)
    assert set(sent) == {wire.TAG_FIELD, *message.__struct_fields__}
    assert [name for name, value in sent.items() if value in EMPTY_BY_DESIGN] == []


@pytest.mark.parametrize("tag", TYPES)
def test_the_readable_file_is_in_the_form_that_the_script_writes(
    tag: str, tables: ModuleType
) -> None:
    message, _ = read(tag)
    assert tables.readable(message) == (GOLDEN / f"{tag}.json").read_bytes()


def test_a_type_without_a_readable_file_is_named(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "GOLDEN", tmp_path)
    with pytest.raises(SystemExit, match=r"write chunk\.v1\.json first"):
        tables.write_golden()


def test_the_script_writes_the_bytes_again(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in TYPES:
        (tmp_path / f"{tag}.json").write_bytes((GOLDEN / f"{tag}.json").read_bytes())
    monkeypatch.setattr(tables, "GOLDEN", tmp_path)
    assert tables.main(["--golden"]) == 0
    for tag in TYPES:
        assert (tmp_path / f"{tag}.msgpack").read_bytes() == read(tag)[1]
