"""Bytes to messages: whatever comes in, a worker gets a message or a typed error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.shared import messages, token_ids, wire
from headrace.shared.errors import (
    MalformedMessageError,
    UnknownMessageError,
    UnsupportedVersionError,
    WireError,
)
from headrace.shared.messages import Cancel, Credit, Frame, Tokens

CANCEL = Cancel(request_id="r1", tenant="default", reason="client disconnected")


def test_a_message_comes_back_as_it_was() -> None:
    assert wire.decode(wire.encode(CANCEL), Credit, Cancel) == CANCEL


def test_a_newer_version_is_refused_by_name() -> None:
    data = msgspec.msgpack.encode({"t": "cancel.v2", "request_id": "r1"})
    with pytest.raises(UnsupportedVersionError, match=r"reads cancel\.v1, got 'cancel\.v2'"):
        wire.decode(data, Cancel)


def test_another_message_is_refused_by_name() -> None:
    with pytest.raises(UnknownMessageError, match=r"expected credit\.v1, got 'cancel\.v1'"):
        wire.decode(wire.encode(CANCEL), Credit)


def test_a_wrong_type_names_the_field() -> None:
    data = msgspec.msgpack.encode({"t": "credit.v1", "derender_instance": "d", "seq": "x"})
    with pytest.raises(MalformedMessageError, match=r"\$\.seq"):
        wire.decode(data, Credit)


def test_a_missing_field_is_named() -> None:
    data = msgspec.msgpack.encode({"t": "credit.v1"})
    with pytest.raises(MalformedMessageError, match="derender_instance"):
        wire.decode(data, Credit)


def test_an_unknown_field_is_ignored_so_that_a_newer_sender_is_understood() -> None:
    data = msgspec.msgpack.encode(
        {"t": "credit.v1", "derender_instance": "d", "seq": 3, "added_later": [1]}
    )
    assert wire.decode(data, Credit) == Credit(derender_instance="d", seq=3)


def test_every_truncation_is_a_wire_error() -> None:
    data = wire.encode(
        Frame(
            decode_instance="decode-1",
            seq=7,
            tokens=(Tokens(stream_id=1, index=0, choice=0, token_ids=token_ids.pack([1, 2])),),
        )
    )
    for length in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:length], Frame)


@given(st.binary(max_size=64))
def test_rubbish_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data, Frame, Cancel, messages.Job)


@given(st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=50))
def test_token_ids_come_back_as_they_were(ids: list[int]) -> None:
    packed = token_ids.pack(ids)
    assert len(packed) == 4 * len(ids) == 4 * token_ids.count(packed)
    assert token_ids.unpack(packed) == ids


def test_token_ids_are_little_endian_on_every_machine() -> None:
    assert token_ids.pack([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"


def test_a_cut_token_id_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="4 bytes each; this field has 5 bytes"):
        token_ids.unpack(b"12345")


def test_the_prompt_hash_tells_ids_salt_and_adapter_apart() -> None:
    ids = token_ids.pack([1, 2, 3])
    hashes = {
        token_ids.prompt_hash(ids),
        token_ids.prompt_hash(token_ids.pack([1, 3, 2])),
        token_ids.prompt_hash(ids, "salt"),
        token_ids.prompt_hash(ids, None, "adapter"),
    }
    assert len(hashes) == 4
