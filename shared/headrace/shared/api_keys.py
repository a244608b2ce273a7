"""API keys: what one is, and the file that says whose it is.

One line a key, in TOML; the key itself stands nowhere:

    "sha256:<64 hex digits>" = { tenant = "acme", name = "ci", expires = 2027-01-01T00:00:00Z }

SHA-256 without salt or stretching is right for these keys, and only for them: 256 random bits can't be guessed,
however fast the guessing, while a slow hash would cost every request.
"""

from __future__ import annotations

import secrets
import tomllib
from datetime import datetime
from hashlib import sha256
from typing import Annotated

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.settings import SubjectToken

PREFIX = "hr_"
"""Tells a leaked key from other random text."""
NUM_RANDOM_BYTES = 32
MIN_CHARS = 16
"""Of a key that somebody made up: a shorter one could be guessed."""

_HASH_NAME = "sha256:"
_Hash = Annotated[str, msgspec.Meta(pattern=f"^{_HASH_NAME}[0-9a-f]{{64}}$")]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a key."""

    tenant: SubjectToken
    """Whose requests it lets in."""
    name: str = ""
    """For people: who has it, what it is for."""
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """From then on it lets nobody in. None: it does not expire."""


def new_key() -> str:
    """Return a key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def digest_of(key: str) -> bytes:
    """Return what is kept of a key."""
    return sha256(key.encode()).digest()


def line_of(key: str, owner: ApiKey) -> str:
    """Return the line of the file that lets `key` in."""
    fields = [f"tenant = {_quoted(owner.tenant)}"]
    if owner.name:
        fields.append(f"name = {_quoted(owner.name)}")
    if owner.expires is not None:
        fields.append(f"expires = {owner.expires.isoformat(timespec='seconds')}")
    return f'"{_HASH_NAME}{digest_of(key).hex()}" = {{ {", ".join(fields)} }}'


def parse_file(text: str) -> dict[bytes, ApiKey]:
    """Return the keys of a file, by digest. Raises: SettingsError with the line or the key's hash."""
    try:
        table = msgspec.convert(tomllib.loads(text), dict[_Hash, ApiKey])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SettingsError(str(error)) from None
    return {bytes.fromhex(name.removeprefix(_HASH_NAME)): owner for name, owner in table.items()}


def parse_inline(text: str, default_tenant: str) -> dict[bytes, ApiKey]:
    """Return the keys of a list as `KEY, TENANT:KEY`, by digest.

    Raises: SettingsError that counts the keys, and shows none.
    """
    keys: dict[bytes, ApiKey] = {}
    for number, item in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        tenant, colon, key = item.rpartition(":")
        if len(key) < MIN_CHARS:
            raise SettingsError(
                f"key {number} has {len(key)} characters and must have {MIN_CHARS} at least; "
                "`headrace keys new` makes one that can't be guessed"
            )
        owner = {"tenant": tenant if colon else default_tenant}
        try:
            keys[digest_of(key)] = msgspec.convert(owner, ApiKey)
        except msgspec.ValidationError:
            raise SettingsError(
                f"key {number}: the tenant before its colon must be 1 to 128 of A-Z a-z 0-9 _ -"
            ) from None
    return keys


def _quoted(text: str) -> str:
    """Return a TOML string: JSON's form is one, but for the character that JSON leaves as it is."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
