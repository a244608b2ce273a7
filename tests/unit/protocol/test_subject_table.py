"""The table of subjects in docs/protocol.md: a row for each builder, and nothing that is not so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.shared import messages, subjects, wire
from headrace.shared.broker.topology import Topology
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role
from headrace.shared.wire import Message

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
NOT_BUILDERS = {"model_slug", "pool", "check_token", "parse_req"}
LANE = re.compile(r"`(HR_\w+)`(?: \(([a-z, ]+)\))?")


def builders() -> dict[str, Callable[..., str]]:
    return {
        name: value
        for name, value in vars(subjects).items()
        if inspect.isfunction(value)
        and value.__module__ == subjects.__name__
        and not name.startswith("_")
        and name not in NOT_BUILDERS
    }


def rows() -> dict[str, list[str]]:
    section = DOCUMENT.read_text().partition("## Subjects")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def build(builder: Callable[..., str], lane: Lane) -> str:
    values = {
        "tenant": "TENANT",
        "slug": "MODEL",
        "pool": "POOL",
        "lane": lane,
        "request_id": "REQUEST_ID",
        "instance": "INSTANCE",
        "blob_id": "BLOB_ID",
        "stream": "STREAM",
        "sequence": "SEQUENCE",
        "token": "TOKEN",
        "kind": "KIND",
        "record_id": "RECORD_ID",
        "file_id": "FILE_ID",
        "number": "NUMBER",
        "batch_id": "BATCH_ID",
        "change": "CHANGE",
        "endpoint_id": "ENDPOINT_ID",
        "role": Role.DECODE,
        "stage": Role.PREFILL,
    }
    return builder(**{name: values[name] for name in inspect.signature(builder).parameters})


def written(row: list[str], lane: Lane) -> str:
    words = {"lane": lane, "role": Role.DECODE, "stage": Role.PREFILL}
    return re.sub(
        r"<(\w+)>", lambda match: words.get(match[1], match[1].upper()), row[0].strip("`")
    )


def test_every_subject_builder_has_its_row_and_every_row_its_builder() -> None:
    assert sorted(rows()) == sorted(builders())


@pytest.mark.parametrize("name", sorted(builders()))
def test_a_row_writes_the_subject_as_its_builder_does(name: str) -> None:
    for lane in Lane:
        assert written(rows()[name], lane) == build(builders()[name], lane)


@pytest.mark.parametrize("name", sorted(builders()))
def test_a_row_names_the_stream_that_captures_its_subject(name: str) -> None:
    topology = Topology(BrokerSettings(), "admin")
    told = LANE.findall(rows()[name][2])
    for lane in Lane:
        stream = topology.stream_of(build(builders()[name], lane))
        names = [n for n, lanes in told if not lanes or lane in lanes.split(", ")]
        assert names == ([] if stream is None else [stream.name])


def test_a_row_without_a_stream_says_core() -> None:
    for row in rows().values():
        assert LANE.search(row[2]) or row[2].startswith("core")


def test_every_message_travels_on_some_row_and_no_row_names_another() -> None:
    tags = {
        wire.tag_of(kind)
        for kind in vars(messages).values()
        if inspect.isclass(kind) and issubclass(kind, Message) and kind is not Message
    }
    bodies = {tag for row in rows().values() for tag in re.findall(r"`([a-z_]+\.v\d+)`", row[3])}
    answers = {tag for row in rows().values() for tag in re.findall(r"`([a-z_]+\.v\d+)`", row[5])}
    assert bodies | answers == tags
    # what comes back as the reply of a request has no subject of its own
    assert answers - bodies == {
        "answer.v1",
        "noted.v1",
        "opened.v1",
        "owner.v1",
        "pong.v1",
        "refused.v1",
    }
