"""docs/asyncapi.yaml: of AsyncAPI's form, and right about what goes over the wire."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import strategies

from headrace.shared import wire
from headrace.shared.subjects import Lane, model_slug
from headrace.shared.submission import MESSAGE_ID, Submission

ROOT = Path(__file__).resolve().parents[3]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
URI = {"type": "string", "format": "uri-reference"}
REFERENCE = {"type": "object", "required": ["$ref"], "properties": {"$ref": URI}}
SCHEMA = {
    "type": "object",
    "required": ["asyncapi", "info", "channels", "operations", "components"],
    "additionalProperties": False,
    "properties": {
        "asyncapi": {"const": "3.0.0"},
        "id": URI,
        "info": {
            "type": "object",
            "required": ["title", "version"],
            "properties": {"title": {"type": "string"}, "version": {"type": "string"}},
        },
        "defaultContentType": {"type": "string"},
        "servers": {
            "type": "object",
            "additionalProperties": {"type": "object", "required": ["host", "protocol"]},
        },
        "channels": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["address", "messages"],
                "properties": {
                    "address": {"type": ["string", "null"]},  # null: not known, as of an ack
                    "messages": {"type": "object", "additionalProperties": REFERENCE},
                    "parameters": {"type": "object"},
                },
            },
        },
        "operations": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["action", "channel"],
                "properties": {
                    "action": {"enum": ["send", "receive"]},
                    "channel": REFERENCE,
                    "messages": {"type": "array", "items": REFERENCE},
                },
            },
        },
        "components": {"type": "object"},
    },
}  # the parts of https://www.asyncapi.com/docs/reference/specification/v3.0.0 that this document uses


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module("scripts.asyncapi")
    finally:
        sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text())
    return found


def test_the_document_has_the_form_that_asyncapi_names(document: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(document)


def test_a_wrong_document_is_not(document: dict[str, Any]) -> None:
    wrong = {**document, "operations": {"submit": {"action": "publish"}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(wrong)


def test_the_document_is_up_to_date(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0, "run make docs"


def test_every_reference_is_to_something(document: dict[str, Any]) -> None:
    refs = set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)))
    assert len(refs) > 20
    for ref in refs:
        found: Any = document
        for name in ref.split("/"):
            found = found[name]


def test_the_examples_are_right_by_their_schemas_and_are_the_bytes_that_are_shown(
    document: dict[str, Any], script: ModuleType
) -> None:
    for kind in script.MESSAGES:
        shown = document["components"]["messages"][wire.tag_of(kind)]
        schema = {**document, **shown["payload"]}
        (example,) = shown["examples"]
        jsonschema.Draft7Validator(schema).validate(example["payload"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate({**example["payload"], "request_id": 7})
        message = msgspec.convert(example["payload"], kind)
        assert wire.decode(bytes.fromhex(shown["x-golden"]), kind) == message


def test_every_header_of_a_submission_is_said(document: dict[str, Any], script: ModuleType) -> None:
    sent = Submission(
        request_id="r1",
        tenant="acme",
        slug="m",
        lane=Lane.STD,
        endpoint="completions",
        deadline=1.0,
        accepted=1.0,
        body=b"{}",
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        reply_to="hr.v1.reply.acme.t",
        is_own_id=False,
        reader="gateway-1",
    )
    headers = document["components"]["schemas"]["SubmissionHeaders"]["properties"]
    assert {*sent.to_headers(), MESSAGE_ID, "Hr-Blob"} - script.OF_THE_EDGE == set(headers)
    assert [name for name in headers if f"| `{name}` |" not in PROTOCOL] == []


def by_the_words(name: str) -> str:
    """Return a model's token as the five steps in the documents say it, without the project's own code."""
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    token, was_allowed = "", True
    for character in name.lower():
        if character in allowed:
            token += character
        elif was_allowed:
            token += "-"
        was_allowed = character in allowed
    token = token.strip("-")
    if token == name and len(token) <= 64:
        return token
    digest = hashlib.blake2b(name.encode(), digest_size=3).hexdigest()
    return f"{token[:64].strip('-')}-{digest}"


def test_the_model_tokens_that_are_shown_are_those_in_the_subjects(
    document: dict[str, Any],
) -> None:
    shown = document["components"]["parameters"]["model"]["x-tokens"]
    rows = re.findall(r"^\| `([^`]+)` \| `([a-z0-9_-]+)` \|$", PROTOCOL, re.MULTILINE)
    assert len(shown) >= 5
    assert len(rows) >= 4
    for name, token in [*shown.items(), *rows]:
        assert token == model_slug(name) == by_the_words(name)


@hypothesis.given(strategies.text(min_size=1) | strategies.text("aB0_-/.", min_size=1, max_size=80))
def test_a_model_token_is_what_the_documents_say(name: str) -> None:
    assert model_slug(name) == by_the_words(name)
