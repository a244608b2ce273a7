"""`Idempotency-Key`: the same call again is the same work, whichever gateway it comes to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from headrace.gateway.errors import KeyReusedError
from headrace.gateway.link import Link
from headrace.shared.errors import BadRequestError, ConflictError
from headrace.shared.messages import Endpoint
from headrace.shared.records import Records

KEY_HEADER = "Idempotency-Key"
MAX_KEY_CHARS = 255
REPLAYED_HEADER = "Idempotent-Replayed"
"""`true` on an answer to a call that was made before."""
PREFIX = "ik_"
_HASH_CHARS = 32
_MAX_RACES = 5


class IdemRecord(msgspec.Struct, kw_only=True, frozen=True):
    """What a key was used for; nothing of the body but its hash."""

    fingerprint: str
    """Hash of path and body."""
    result_id: str
    """The request, response or batch that the call made."""
    created: float
    """When (Unix seconds)."""
    endpoint: Endpoint = "chat.completions"
    """Which OpenAI endpoint the body is for."""
    model: str = ""
    """Served model name, as the caller names it."""
    stream: bool = False
    """Whether the answer goes out in chunks."""
    deadline: float = 0.0
    """The request's (Unix seconds)."""
    is_accepted: bool = False
    """Whether the pipeline has it for certain; else whoever comes next submits it under the same ID."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A key and what it stands for."""

    tenant: str
    record_id: str
    record: IdemRecord
    revision: int
    is_new: bool  #: this call is the first one with the key


def key_of(values: list[str]) -> str | None:
    """Return the key in a request's headers, or None. Raises: BadRequestError."""
    if not values:
        return None
    if len(values) > 1:
        raise BadRequestError(f"send one {KEY_HEADER}, not {len(values)}", param=KEY_HEADER)
    key = values[0]
    if not 1 <= len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise BadRequestError(
            f"{KEY_HEADER} must be 1 to {MAX_KEY_CHARS} printable ASCII characters, got {len(key)}",
            param=KEY_HEADER,
        )
    return key


def fingerprint(path: str, body: bytes) -> str:
    """Return what tells one call from another."""
    return blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()


class Idempotency:
    """The keys of every tenant, for `kept_s` seconds each. Every method raises BrokerError without a broker."""

    def __init__(
        self, link: Link, *, kept_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._link = link
        self._kept_s = kept_s
        self._clock = clock

    async def find(self, tenant: str, key: str, fingerprint: str) -> Claim | None:
        """Return what a key stands for, or None. Raises: KeyReusedError when it is for another call."""
        record_id = _record_id(tenant, key)
        found = await self._records.get("idem", tenant, record_id, IdemRecord)
        if found is None:
            return None
        record, revision = found
        if record.fingerprint != fingerprint:
            raise KeyReusedError(
                f"this {KEY_HEADER} was used for another call or another body; send a new one"
            )
        return Claim(tenant, record_id, record, revision, is_new=False)

    async def claim(
        self, tenant: str, key: str, record: IdemRecord, *, result_id: str | None = None
    ) -> Claim:
        """Take a key, or return who has it; of any number of calls at once, one gets it.

        `result_id`: what it will stand for; None: a request ID that leads back to the key (`record_of`).
        Raises: KeyReusedError when it is for another call; ConflictError when others take and release it all the time.
        """
        record_id = _record_id(tenant, key)
        result_id = result_id or f"{PREFIX}{record_id}_{uuid.uuid4().hex[:8]}"
        record = msgspec.structs.replace(record, result_id=result_id, created=self._clock())
        for _ in range(_MAX_RACES):
            if (found := await self.find(tenant, key, record.fingerprint)) is not None:
                return found
            try:
                revision = await self._put(tenant, record_id, record, 0)
            except ConflictError:
                continue
            return Claim(tenant, record_id, record, revision, is_new=True)
        raise ConflictError(f"{KEY_HEADER}: others take and release this key all the time")

    async def accept(self, claim: Claim) -> None:
        """Note that what the key stands for is under way for certain."""
        record = msgspec.structs.replace(claim.record, is_accepted=True)
        try:
            await self._put(claim.tenant, claim.record_id, record, claim.revision)
        except ConflictError:
            return  # another call with the key has noted it

    async def release(self, claim: Claim) -> None:
        """Free a key whose call came to nothing, so that it may be tried again."""
        try:
            await self._records.delete("idem", claim.tenant, claim.record_id, expect=claim.revision)
        except ConflictError:
            return  # another call has it under way

    async def record_of(self, tenant: str, request_id: str) -> IdemRecord | None:
        """Return what is known of a request that was made with a key, or None."""
        if not request_id.startswith(PREFIX):
            return None
        record_id = request_id.removeprefix(PREFIX)[:_HASH_CHARS]
        if len(record_id) < _HASH_CHARS:
            return None
        found = await self._records.get("idem", tenant, record_id, IdemRecord)
        return found[0] if found is not None and found[0].result_id == request_id else None

    async def _put(self, tenant: str, record_id: str, record: IdemRecord, expect: int) -> int:
        left_s = record.created + self._kept_s - self._clock()
        return await self._records.put(
            "idem", tenant, record_id, record, expect=expect, ttl_s=max(1.0, left_s)
        )

    @property
    def _records(self) -> Records:
        return Records(self._link.broker)


def _record_id(tenant: str, key: str) -> str:
    return blake2b(f"{tenant}\0{key}".encode(), digest_size=_HASH_CHARS // 2).hexdigest()
