"""Bytes to messages and back: msgpack, one typed error for each way that bytes can be wrong.

The rules by which a message may change are those of msgspec's schema evolution: a new field has a
default, a field never changes its type or its meaning, a removed name is never used again, and what
breaks these rules is a new version of the type (`job.v1` → `job.v2`).
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar, Union, overload

import msgspec

from headrace.shared.errors import (
    MalformedMessageError,
    UnknownMessageError,
    UnsupportedVersionError,
)

TAG_FIELD = "t"

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field=TAG_FIELD, omit_defaults=True):
    """The base of every message: a tag `<name>.v<version>` in field `t`, unknown fields ignored."""


A = TypeVar("A", bound=Message)
B = TypeVar("B", bound=Message)
C = TypeVar("C", bound=Message)
D = TypeVar("D", bound=Message)
E = TypeVar("E", bound=Message)


class _TagOnly(msgspec.Struct):
    t: str


_tag_decoder = msgspec.msgpack.Decoder(_TagOnly)


def encode(message: Message) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def tag_of(message_type: type[Message]) -> str:
    """Return the tag that stands in field `t`, as `job.v1`."""
    tag = message_type.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


@functools.cache
def _decoder(message_types: tuple[type[Message], ...]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[message_types])  # noqa: UP007


@overload
def decode(data: bytes, a: type[A], /) -> A: ...
@overload
def decode(data: bytes, a: type[A], b: type[B], /) -> A | B: ...
@overload
def decode(data: bytes, a: type[A], b: type[B], c: type[C], /) -> A | B | C: ...
@overload
def decode(
    data: bytes, a: type[A], b: type[B], c: type[C], d: type[D], e: type[E], /
) -> A | B | C | D | E: ...
def decode(data: bytes, *message_types: type[Message]) -> Message:
    """Return the message in `data`, which must be one of `message_types`.

    Raises: UnknownMessageError, UnsupportedVersionError or MalformedMessageError, each saying what was
    found and what would be right.
    """
    try:
        message: Message = _decoder(message_types).decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _reason(data, message_types, error) from None


def _reason(
    data: bytes, message_types: tuple[type[Message], ...], error: Exception
) -> MalformedMessageError | UnknownMessageError | UnsupportedVersionError:
    expected = ", ".join(tag_of(t) for t in message_types)
    try:
        found = _tag_decoder.decode(data).t
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return MalformedMessageError(
            f"expected {expected}, got {len(data)} bytes that are no message: {error}"
        )
    known = {tag_of(t) for t in message_types}
    if found in known:
        return MalformedMessageError(f"{found}: {error}")
    name = found.rpartition(".v")[0]
    if name in {tag.rpartition(".v")[0] for tag in known}:
        return UnsupportedVersionError(f"this release reads {expected}, got {found!r}")
    return UnknownMessageError(f"expected {expected}, got {found!r}")
