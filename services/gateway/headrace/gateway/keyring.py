"""The API keys that let requests in; the file is read again when it changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.shared.api_keys import ApiKey, digest_of, parse_file, parse_inline
from headrace.shared.errors import SettingsError
from headrace.shared.settings import GatewaySettings

logger = logging.getLogger(__name__)

POLL_S = 1.0

Stamp = tuple[int, int, int]


class Keyring:
    """Keys of the settings and of a file. With neither, everybody is let in."""

    def __init__(
        self,
        inline: Mapping[bytes, ApiKey],
        file: Path | None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the file. Raises: SettingsError when it can't be read."""
        self._inline = inline
        self._file = file
        self._now = now
        self._keys = dict(inline)
        self._loaded: Stamp | None = None  #: the file as it was when it was last read
        self._seen: Stamp | None = None  #: the file as the last look found it
        self._trouble = ""
        if file is not None:
            self._seen = self._loaded = _stamp(file)
            self._read(file)

    @classmethod
    def of(cls, settings: GatewaySettings) -> Keyring:
        """Return the keys that the settings name. Raises: SettingsError naming the setting."""
        try:
            inline = parse_inline(settings.api_keys, settings.tenant)
        except SettingsError as error:
            raise SettingsError(f"gateway.api_keys: {error}") from None
        file = Path(settings.api_keys_file) if settings.api_keys_file else None
        return cls(inline, file)

    @property
    def is_on(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._inline) or self._file is not None

    def owner_of(self, key: str) -> ApiKey | None:
        """Return what is known of a key. None: nothing, or it has expired.

        Every key is compared, each in constant time: how long it takes says nothing about any of them.
        """
        digest = digest_of(key)
        found: ApiKey | None = None
        for known, owner in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = owner
        if found is None or found.expires is None or found.expires.timestamp() > self._now():
            return found
        return None

    async def watch(self) -> None:
        """Look at the file every second, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.look)  # a file system that hangs must not hold up requests

    def look(self) -> None:
        """Read the file again if it has changed, and not since the last look: it may be half written.

        One that can't be read changes nothing: the keys that were there stay good, and the log says so.
        """
        if self._file is None:
            return
        try:
            stamp = _stamp(self._file)
            is_settled, self._seen = stamp == self._seen, stamp
            if stamp == self._loaded or not is_settled:
                return
            self._read(self._file)
            self._loaded = (
                stamp  # not before: what keeps it from being read may leave no trace in it
            )
        except SettingsError as error:
            self._complain(str(error))
            return
        self._trouble = ""
        logger.info("API keys read again: %d", len(self._keys), extra={"action": "api_keys_loaded"})

    def _read(self, file: Path) -> None:
        try:
            found = parse_file(file.read_text())
        except (OSError, UnicodeDecodeError, SettingsError) as error:
            raise SettingsError(f"gateway.api_keys_file {file}: {error}") from None
        self._keys = {**self._inline, **found}
        if not found:
            logger.warning("%s holds no API key", file, extra={"action": "api_keys_empty"})

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:  # once, not every second
            logger.error(
                "the API keys stay as they were: %s", trouble, extra={"action": "api_keys_failed"}
            )
        self._trouble = trouble


def operators_of(settings: GatewaySettings) -> frozenset[str]:
    """Return the tenants that may know where the workers run."""
    names = (name.strip() for name in settings.operators.split(","))
    return frozenset(name for name in names if name)


def _stamp(file: Path) -> Stamp:
    """Return what changes with a file's content. Raises: SettingsError when there is no file."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise SettingsError(f"gateway.api_keys_file {file}: {error.strerror}") from None
    return found.st_ino, found.st_mtime_ns, found.st_size
