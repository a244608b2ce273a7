"""One prefill task on its way: decode is told that it is taken, it is computed, and decode has its answer.

What decode is told comes as a request, and is said again until decode has noted it: core NATS loses messages
silently.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.shared import subjects, wire
from headrace.shared.broker import Delivery
from headrace.shared.errors import (
    BrokerError,
    EngineRequestError,
    NoWorkerError,
    RequestError,
    WireError,
)
from headrace.shared.messages import (
    Handoff,
    PrefillFailed,
    PrefillNoted,
    PrefillStarted,
    PrefillTask,
)
from headrace.shared.openai_errors import failure_of
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

NOTED_TIMEOUT_S = 1.0
RETRY_S = 0.2

Answer = Handoff | PrefillFailed


class Errand:
    """Brings one task to its end; `compute` returns its answer, and stops when it is cancelled."""

    def __init__(
        self,
        worker: Worker,
        task: PrefillTask,
        compute: Callable[[PrefillTask], Awaitable[Answer]],
        drop: Callable[[Handoff], Awaitable[None]],
    ) -> None:
        """`drop` frees the blocks of a handoff that nobody can have."""
        self._worker = worker
        self._task = task
        self._compute = compute
        self._drop = drop
        self._may_be_known = False  # whether decode may have the handoff, and so pull
        # Decode's clock may be another one.
        self._expires = task.expires + worker.table.clock_offset(task.decode_instance)
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, delivery: Delivery) -> Answer | None:
        """Compute the task and hand its answer over; None: nobody wanted it.

        The delivery is acked as soon as decode knows who computes: from then on decode retries.
        Raises: BrokerError, EngineDeadError and what else `compute` lets escape, once decode was told.
        """
        unwatch = self._worker.pulse.watch(self._task.decode_instance, self._lose)
        computing = asyncio.ensure_future(self._compute(self._task))
        try:
            async with delivery.keep_alive():
                if not await self._is_wanted(computing):
                    logger.info(
                        "prefill task dropped: nobody waits for it",
                        extra={
                            "action": "prefill_dropped",
                            "request_id": self._task.request_id,
                        },
                    )
                    await delivery.ack()
                    return None
                await self._ack(delivery)
            await self._first_of(computing)
            if not computing.done():
                return None
            return await self._hand_over(computing)
        finally:
            unwatch()
            computing.cancel()
            (answer,) = await asyncio.gather(computing, return_exceptions=True)
            # Of a handoff that may be known, the blocks stay until the lease ends: decode may be cut off from the
            # broker and pull all the same.
            if isinstance(answer, Handoff) and not self._may_be_known:
                await self._drop(answer)

    async def _ack(self, delivery: Delivery) -> None:
        """Decode knows: a copy that comes again, because the broker was away, is dropped."""
        try:
            await delivery.ack()
        except BrokerError as error:
            logger.warning(
                "prefill task not acked: %s",
                error,
                extra={"action": "not_settled", "request_id": self._task.request_id},
            )

    def _lose(self) -> None:
        """Decode is gone, and with it everybody who waits."""
        logger.warning(
            "decode worker %s is gone, its prefill task ends",
            self._task.decode_instance,
            extra={"action": "prefill_abandoned", "request_id": self._task.request_id},
        )
        if not self._gone.done():
            self._gone.set_result(None)

    async def _is_wanted(self, computing: asyncio.Future[Answer]) -> bool:
        """Tell decode who computes the task, while it is computed already; return what decode says."""
        started = PrefillStarted(
            task_id=self._task.task_id,
            request_id=self._task.request_id,
            prefill_instance=self._worker.instance,
        )
        asking = asyncio.create_task(self._until_noted(started, self._expires))
        try:
            await self._first_of(asking, computing)
            # A quick answer says more than that it is on its way.
            return asking.result() if asking.done() else not self._gone.done()
        finally:
            asking.cancel()

    async def _hand_over(self, computing: asyncio.Future[Answer]) -> Answer | None:
        try:
            answer = computing.result()
        except Exception as error:
            # Decode must not wait for what will never come; then whoever runs this sees to the error.
            failed = self._failed(EngineRequestError(f"prefill failed: {type(error).__name__}"))
            await self._tell(failed)
            raise
        return await self._tell(answer)

    async def _tell(self, answer: Answer) -> Answer | None:
        until = answer.expires if isinstance(answer, Handoff) else self._expires
        telling = asyncio.create_task(self._until_noted(answer, until))
        try:
            await self._first_of(telling)
            if telling.done() and telling.result():
                return answer
            return None
        except RequestError as error:  # too large for any message
            return await self._tell(self._failed(error))
        finally:
            telling.cancel()

    async def _first_of(self, *ends: asyncio.Future[Any]) -> None:
        """Return when one of these is done, or decode is gone."""
        await asyncio.wait({*ends, self._gone}, return_when=asyncio.FIRST_COMPLETED)

    def _failed(self, error: RequestError) -> PrefillFailed:
        return PrefillFailed(
            task_id=self._task.task_id,
            request_id=self._task.request_id,
            prefill_instance=self._worker.instance,
            failure=failure_of(error),
        )

    async def _until_noted(self, message: PrefillStarted | Answer, until: float) -> bool:
        """Say it until decode has noted it, or it is too late; return whether the task is wanted still."""
        subject, payload = subjects.kv(self._task.decode_instance), wire.encode(message)
        while time.time() < until:
            was_known = self._may_be_known
            self._may_be_known = was_known or isinstance(message, Handoff)
            try:
                reply = await self._worker.broker.request(
                    subject, payload, timeout_s=NOTED_TIMEOUT_S
                )
                return wire.decode(reply, PrefillNoted).wanted
            except NoWorkerError:
                self._may_be_known = was_known  # nobody was there to hear it
                if isinstance(message, PrefillStarted):
                    # A decode worker that comes back publishes again what it waits for.
                    return False
            except (BrokerError, WireError) as error:
                logger.warning(
                    "decode has not noted it yet: %s",
                    error,
                    extra={"action": "noted_late", "request_id": self._task.request_id},
                )
            except RequestError:  # it was not even sent
                self._may_be_known = was_known
                raise
            await asyncio.sleep(RETRY_S)
        return False
