"""`headrace keys new`: an API key, shown once, and the line by which the gateway will know it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from headrace.shared import api_keys
from headrace.shared.api_keys import ApiKey
from headrace.shared.errors import SettingsError


def new(
    tenant: str, name: str = "", expires_days: int | None = None, *, now: datetime | None = None
) -> str:
    """Return what to print; only its first line must be kept secret.

    Raises: SettingsError for a tenant that can't stand in a subject, or days that end in the past.
    """
    expires = None
    if expires_days is not None:
        if not 0 < expires_days <= 36_500:
            raise SettingsError(f"--expires-days must be 1 to 36500, got {expires_days}")
        expires = (now or datetime.now(UTC)) + timedelta(days=expires_days)
    try:
        owner = msgspec.convert({"tenant": tenant, "name": name, "expires": expires}, ApiKey)
    except msgspec.ValidationError:
        raise SettingsError(
            f"--tenant must be 1 to 128 of A-Z a-z 0-9 _ -, got {tenant!r}"
        ) from None
    key = api_keys.new_key()
    return (
        f"{key}\n\n"
        "This key is shown once, and kept nowhere. Its line for the file that gateway.api_keys_file names:\n\n"
        f"{api_keys.line_of(key, owner)}\n"
    )
