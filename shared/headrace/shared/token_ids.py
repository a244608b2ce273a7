"""Token IDs on the wire: packed little-endian uint32, 4 bytes an ID.

A 100,000-token prompt is 400 kB, and a consumer that keeps the buffer never builds a list.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

from headrace.shared.errors import MalformedMessageError

TOKEN_ID_BYTES = 4
_BIG_ENDIAN = sys.byteorder == "big"


def pack(token_ids: Iterable[int]) -> bytes:
    """Pack token IDs for the wire.

    Raises: OverflowError for an ID outside 0 to 2**32 - 1, TypeError for bytes: `array` would read them as
    machine words, and not as one ID a byte.
    """
    if isinstance(token_ids, bytes | bytearray | memoryview):
        raise TypeError("expected token IDs, got bytes")
    packed = array("I", token_ids)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> list[int]:
    """Return the token IDs of a packed field.

    Raises: MalformedMessageError when the length is not a multiple of 4 bytes.
    """
    if len(data) % TOKEN_ID_BYTES:
        raise MalformedMessageError(
            f"packed token IDs take {TOKEN_ID_BYTES} bytes each; this field has {len(data)} bytes"
        )
    packed = array("I")
    packed.frombytes(data)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tolist()


def count(data: bytes) -> int:
    """Return how many token IDs a packed field holds, without unpacking it."""
    return len(data) // TOKEN_ID_BYTES


def prompt_hash(token_ids: bytes, cache_salt: str | None = None, adapter: str | None = None) -> str:
    """Return the hash that binds a handoff to its prompt: 32 hex digits over IDs, salt and adapter.

    vLLM never compares the tokens of a pulled KV cache with the prompt, so a handoff of another prompt
    of the same length would answer the wrong question without an error.
    """
    digest = blake2b(token_ids, digest_size=16)
    digest.update(repr((cache_salt, adapter)).encode())
    return digest.hexdigest()
