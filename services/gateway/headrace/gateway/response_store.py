"""Stored responses: their records, their ends, and who goes on from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.gateway import response_body
from headrace.gateway.errors import MAX_SHOWN_ID, ResponseNotFoundError
from headrace.gateway.link import Link
from headrace.gateway.response_object import StoredResponse, is_gone, response_of
from headrace.shared import subjects, wire
from headrace.shared.errors import (
    BadRequestError,
    ConflictError,
    WireError,
)
from headrace.shared.messages import Terminal
from headrace.shared.records import Records

MAX_INLINE_BYTES = 64 * 2**10
"""A larger body is kept beside its record, which is limited."""
_MAX_RACES = 5


class ResponseStore:
    """The stored responses of every tenant. Every method raises BrokerError without a broker."""

    def __init__(
        self, link: Link, *, kept_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`kept_s`: how long one is kept from its end."""
        self._link = link
        self._kept_s = kept_s
        self._clock = clock

    async def add(self, tenant: str, record: StoredResponse, body: bytes) -> StoredResponse:
        """Keep a new record with its body, and return it. Raises: ConflictError for an ID that is taken."""
        if len(body) <= MAX_INLINE_BYTES:
            record = msgspec.structs.replace(record, body=msgspec.Raw(body))
        else:
            ref = await self._link.broker.put_blob(body, ttl_s=int(self._left_s(record)) + 1)
            record = msgspec.structs.replace(record, blob=ref)
        await self._put(tenant, record, 0)
        return record

    async def discard(self, tenant: str, response_id: str) -> None:
        """Forget a response; what it became is nobody's any more."""
        await self._records.delete("resp", tenant, response_id, expect=None)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a record. Raises: ResponseNotFoundError, also for one whose time is over."""
        found = await self._find(tenant, response_id)
        if found is None:
            raise ResponseNotFoundError(response_id)
        return found[0]

    async def end_of(self, tenant: str, record: StoredResponse) -> Terminal | None:
        """Return how it ended; None: it did not. Raises: ResponseNotFoundError when it is kept no longer."""
        terminal = await end_of(self._link, tenant, record.response_id)
        if is_gone(record, terminal, now=self._clock(), kept_s=self._kept_s):
            raise ResponseNotFoundError(record.response_id)
        return terminal

    async def fields_of(self, record: StoredResponse) -> dict[str, Any]:
        """Return the body that the pipeline was given."""
        body = bytes(record.body)
        if record.blob is not None:
            body = await self._link.broker.get_blob(record.blob)
        fields: dict[str, Any] = msgspec.json.decode(body)
        return fields

    async def shown(self, tenant: str, record: StoredResponse) -> dict[str, Any]:
        """Return a response as it is now. Raises: ResponseNotFoundError."""
        terminal = await self.end_of(tenant, record)
        return response_of(record, await self.fields_of(record), terminal, now=self._clock())

    async def history(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """Return the conversation up to and with a response, without its instructions and reasoning.

        Raises: BadRequestError when it is not there, or has not ended well.
        """
        param = "previous_response_id"
        try:
            record = await self.get(tenant, response_id)
            response = await self.shown(tenant, record)
        except ResponseNotFoundError:
            raise BadRequestError(
                f"Previous response with id '{response_id[:MAX_SHOWN_ID]}' not found: responses are "
                "kept that were asked for with `store` or `background` true",
                param=param,
            ) from None
        if response["status"] not in ("completed", "incomplete"):
            raise BadRequestError(
                f"the previous response '{response_id}' is {response['status']}; only one that has ended well "
                "can be gone on from",
                param=param,
            )
        said = response_body.items_of((await self.fields_of(record)).get("input"))
        return [*said, *(item for item in response["output"] if item.get("type") != "reasoning")]

    async def note(self, tenant: str, response_id: str, **fields: bool) -> None:
        """Set fields of a record, if it is still there."""
        for _ in range(_MAX_RACES):
            found = await self._find(tenant, response_id)
            if found is None or all(getattr(found[0], name) == fields[name] for name in fields):
                return
            try:
                await self._put(tenant, msgspec.structs.replace(found[0], **fields), found[1])
            except ConflictError:
                continue
            return

    async def _find(self, tenant: str, response_id: str) -> tuple[StoredResponse, int] | None:
        return await self._records.find("resp", tenant, response_id, StoredResponse)

    async def _put(self, tenant: str, record: StoredResponse, expect: int) -> None:
        await self._records.put(
            "resp", tenant, record.response_id, record, expect=expect, ttl_s=self._left_s(record)
        )

    def _left_s(self, record: StoredResponse) -> float:
        return max(1.0, record.deadline + self._kept_s - self._clock())

    @property
    def _records(self) -> Records:
        return Records(self._link.broker)


async def end_of(link: Link, tenant: str, request_id: str) -> Terminal | None:
    """Return the kept terminal of a request, or None. Raises: BrokerError."""
    stored = await link.broker.last(subjects.res(tenant, request_id))
    if stored is None:
        return None
    try:
        return wire.decode(stored.payload, Terminal)
    except WireError:
        return None
