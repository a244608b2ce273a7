"""What of an answer must not be random: the same token IDs give the same bytes, on whichever worker."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

import msgspec

# Fields stand in the order of the model's definition. The client may have chosen the ID, quotes and all.
_CREATED = re.compile(r'\A(\{"id":"(?:[^"\\]|\\.)*","object":"[^"]*","created":)\d+')
_RANDOM_ID = re.compile(r"[0-9a-f]{16,32}\Z|\A[A-Za-z0-9]{9}\Z")


def with_created(chunk: str, created: int) -> bytes:
    """Return a chat chunk with the job's `created`; vLLM's generator takes the time when it starts."""
    return _CREATED.sub(rf"\g<1>{created}", chunk, count=1).encode()


class ToolCallIds:
    """Puts IDs made of request, choice and position in place of the random ones that parsers make.

    An answer that is replayed by another worker has to go on with the IDs that the client already has. IDs with
    a meaning (`functions.get_weather:0`) stay.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._known: dict[int, dict[str, str]] = {}

    def in_chunk(self, chunk: bytes) -> bytes:
        """Return a chunk of a streamed chat."""
        return self._replaced(chunk, "delta")

    def in_body(self, body: bytes) -> bytes:
        """Return the body of a whole chat."""
        return self._replaced(body, "message")

    def _replaced(self, data: bytes, part: str) -> bytes:
        if b'"tool_calls":[{' not in data:
            return data
        answer: dict[str, Any] = msgspec.json.decode(data)
        for choice in answer["choices"]:
            for call in (choice.get(part) or {}).get("tool_calls") or ():
                if call.get("id"):
                    call["id"] = self._fixed(choice["index"], call["id"])
        return msgspec.json.encode(answer)

    def _fixed(self, choice: int, random_id: str) -> str:
        known = self._known.setdefault(choice, {})
        if random_id not in known:
            seed = f"{self._request_id}/{choice}/{len(known)}".encode()
            digits = blake2b(seed, digest_size=16).hexdigest()
            known[random_id] = _RANDOM_ID.sub(lambda match: digits[: len(match.group())], random_id)
        return known[random_id]
