"""What prefill workers say on this decode worker's own subject: each task's answer is taken once."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from headrace.decode.pending import Pending
from headrace.engine.interface import DecodeEngine
from headrace.shared import metrics, subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import BrokerError, HandoffError, RequestError, WireError
from headrace.shared.messages import Handoff, PrefillFailed, PrefillNoted, PrefillStarted
from headrace.shared.tasks import spawn
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000


class HandoffInbox:
    """Gives each answer to who waits for it, in `pending`; every other handoff is given back."""

    def __init__(self, worker: Worker, engine: DecodeEngine) -> None:
        self.pending: dict[str, Pending] = {}  #: task ID → who waits
        self._worker = worker
        self._engine = engine
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()  # the latest handoffs
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises: BrokerError."""
        await self._worker.broker.subscribe(subjects.kv(self._worker.instance), self._on_answer)

    def release(self, answer: Handoff | PrefillFailed | None) -> None:
        """Give a handoff back that will not be pulled, so that prefill frees its blocks."""
        if isinstance(answer, Handoff):
            spawn(self._release(answer), self._tasks)

    def _on_answer(self, received: Received) -> None:
        try:
            answer = wire.decode(received.payload, PrefillStarted, Handoff, PrefillFailed)
        except WireError as error:
            logger.warning(
                "unreadable answer from prefill: %s", error, extra={"action": "handoff_unreadable"}
            )
            return
        pending = self.pending.get(answer.task_id)
        if isinstance(answer, PrefillStarted):
            wanted = pending is not None and pending.start(answer, self._worker.pulse)
            self._reply(received, wanted)
            return
        self._reply(received, wanted=True)
        if isinstance(answer, Handoff) and not self._is_new(answer):
            # Its blocks may be in use: giving it back would free them under a pull.
            log_refused(
                answer, "repeated", f"it was brought already, now for task {answer.task_id}"
            )
            if pending is not None:  # a task that waits still: another one has used it
                pending.give_up()
        elif (pending is None or not pending.take(answer)) and isinstance(answer, Handoff):
            metrics.HANDOFFS_ORPHANED.inc()
            log_refused(answer, "unknown_task", f"nobody waits for task {answer.task_id}")
            self.release(answer)

    def _is_new(self, handoff: Handoff) -> bool:
        key = (handoff.epoch, str(handoff.kv_transfer_params.get("remote_request_id")))
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def _reply(self, received: Received, wanted: bool) -> None:
        """Tell prefill that this is here, so that it needs not say it again."""
        if received.reply:
            spawn(self._respond(received, PrefillNoted(wanted=wanted)), self._tasks)

    async def _respond(self, received: Received, noted: PrefillNoted) -> None:
        try:
            await self._worker.broker.respond(received, wire.encode(noted))
        except BrokerError as error:
            logger.debug("prefill not answered: %s", error, extra={"action": "noted_lost"})

    async def _release(self, handoff: Handoff) -> None:
        try:
            await self._engine.release_handoff(handoff.kv_transfer_params)
        except (RequestError, HandoffError) as error:
            logger.warning(
                "handoff not released, its lease will end: %s",
                error,
                extra={"action": "handoff_release_failed", "request_id": handoff.request_id},
            )


def log_refused(handoff: Handoff, reason: str, why: str) -> None:
    """Say why a handoff does not reach the engine; `reason` is a stable word."""
    metrics.HANDOFFS_REFUSED.labels(reason).inc()
    logger.warning(
        "handoff refused: %s",
        why,
        extra={
            "action": "handoff_refused",
            "reason": reason,
            "request_id": handoff.request_id,
        },
    )
