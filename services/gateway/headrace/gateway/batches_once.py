"""Batches that are made with an `Idempotency-Key`: the same call again is the same batch."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from headrace.gateway.batches import Batches
from headrace.gateway.errors import InFlightError, NotFoundError
from headrace.gateway.idempotency import KEY_HEADER, Claim, Idempotency, IdemRecord
from headrace.shared.batches import BatchRecord
from headrace.shared.errors import ConflictError, HeadraceError
from headrace.shared.records import new_id

MAKING_S = 60.0
"""Whoever took a key has made its batch by then, or is gone."""

Make = Callable[[str], Awaitable[BatchRecord]]


class BatchesOnce:
    """Makes one batch for each key."""

    def __init__(
        self,
        idempotency: Idempotency,
        batches: Batches,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._idempotency = idempotency
        self._batches = batches
        self._clock = clock

    async def make(self, tenant: str, key: str, mark: str, make: Make) -> tuple[BatchRecord, bool]:
        """Return the key's batch as it is now, and whether this call made it; `make` is given its ID.

        Raises: KeyReusedError, InFlightError, and what `make` raises; BrokerError.
        """
        wanted = IdemRecord(fingerprint=mark, result_id="", created=0.0)
        try:
            claim = await self._idempotency.claim(tenant, key, wanted, result_id=new_id("batch_"))
        except ConflictError as error:
            raise InFlightError(str(error)) from None
        if not claim.is_new:
            return await self._again(claim, make), False
        try:
            batch = await make(claim.record.result_id)
        except HeadraceError:
            await self._idempotency.release(claim)
            raise
        await self._idempotency.accept(claim)
        return batch, True

    async def _again(self, claim: Claim, make: Make) -> BatchRecord:
        record = claim.record
        try:
            return await self._batches.get(claim.tenant, record.result_id)
        except NotFoundError:
            if record.is_accepted:
                raise
            if self._clock() - record.created < MAKING_S:
                raise InFlightError(
                    f"the batch with this {KEY_HEADER} is being made; ask again to get it"
                ) from None
        try:
            batch = await make(record.result_id)
        except ConflictError:  # somebody else has made it just now
            return await self._batches.get(claim.tenant, record.result_id)
        await self._idempotency.accept(claim)
        return batch
