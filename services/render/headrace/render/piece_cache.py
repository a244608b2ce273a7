"""Token IDs of pieces of text that came before, within a bound of memory."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from hashlib import blake2b

#: bytes that an entry takes beside its token IDs: the key, the array, the place in the table (measured: 230 to 260)
ENTRY_BYTES = 256


class PieceCache:
    """Keeps the entries that were used last; any thread may ask."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """What the entries take."""
        return self._num_bytes

    def get(self, keys: list[bytes]) -> list[array[int] | None]:
        """Return the token IDs of each key; None: not here."""
        with self._lock:
            found = [self._entries.get(key) for key in keys]
            for key, token_ids in zip(keys, found, strict=True):
                if token_ids is not None:
                    self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, token_ids: array[int]) -> None:
        """Keep an entry, in the place of those that were not used for longest; one that is too large is not kept."""
        size = _size(token_ids)
        if size > self._max_bytes:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._num_bytes += size - (0 if old is None else _size(old))
            self._entries[key] = token_ids
            while self._num_bytes > self._max_bytes:
                _, last = self._entries.popitem(last=False)
                self._num_bytes -= _size(last)


def key_of(piece: bytes, scope: bytes) -> bytes:
    """Return the key of a piece of text for those who share `scope`: 32 bytes.

    Nobody finds two pieces, or two scopes, that have the same key: it is a cryptographic hash.
    """
    return blake2b(piece, digest_size=32, key=scope).digest()


def _size(token_ids: array[int]) -> int:
    return ENTRY_BYTES + len(token_ids) * token_ids.itemsize
