"""Whether another decode worker has a job: each of them is asked.

A broker that is killed may forget that it gave a job out, and gives it to a second worker while the first one
answers it, and is heard. Read on `out` is then no help: what was there may be forgotten as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import BrokerError, NoWorkerError, WireError
from headrace.shared.messages import AskOwner, Job, Owner
from headrace.shared.pulse import RECONNECT_GRACE_S
from headrace.shared.subjects import Role
from headrace.shared.tasks import spawn
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
"""Who does not answer in that time is stopped, and hears of the takeover later."""
PAUSE_S = 0.25


class Elsewhere:
    """Asks the other decode workers of this pool, and answers them."""

    def __init__(self, worker: Worker, is_owner: Callable[[str, str], bool]) -> None:
        """`is_owner` says of a tenant and a request ID whether that job is in this worker's hands."""
        self._worker = worker
        self._is_owner = is_owner
        self._known: set[str] = set()  # who was there before the broker was lost
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Answer the others. Raises: BrokerError."""
        subject = subjects.owner(self._worker.instance)
        await self._worker.broker.subscribe(subject, self._on_question)

    def look(self) -> None:
        """Note who is there; called all the time, so that it is known when the broker is lost."""
        there = self._there()
        if self._worker.broker.is_connected and not self._are_coming_back():
            self._known = there
        else:
            self._known |= there

    async def has(self, job: Job) -> bool:
        """Whether one of them has the job.

        After the broker was away this waits for those that are not back yet, for at most `RECONNECT_GRACE_S`.
        """
        question = wire.encode(AskOwner(request_id=job.request_id, tenant=job.tenant))
        known = self._known | self._there()
        while known:
            answers = {name: self._ask(name, question) for name in known}
            found = dict(zip(answers, await asyncio.gather(*answers.values()), strict=True))
            if any(found.values()):
                return True
            known = {name for name, is_owner in found.items() if is_owner is None}
            if not self._are_coming_back():
                break
            await asyncio.sleep(PAUSE_S if known else 0)
        return False

    def _are_coming_back(self) -> bool:
        return time.time() < self._worker.broker.back_at + RECONNECT_GRACE_S

    def _there(self) -> set[str]:
        return {
            beat.instance
            for beat in self._worker.table.workers()
            if beat.role == Role.DECODE
            and beat.contract == self._worker.contract
            and beat.instance != self._worker.instance
        }

    async def _ask(self, instance: str, question: bytes) -> bool | None:
        """Return what it says; None: nobody of that name listens (yet)."""
        try:
            answer = await self._worker.broker.request(
                subjects.owner(instance), question, timeout_s=ANSWER_TIMEOUT_S
            )
            return wire.decode(answer, Owner).is_owner
        except NoWorkerError:
            return None
        except (BrokerError, WireError) as error:
            logger.warning(
                "%s does not say what it has: %s",
                instance,
                error,
                extra={"action": "owner_unknown", "worker": instance},
            )
            return False

    def _on_question(self, received: Received) -> None:
        spawn(self._answer(received), self._tasks)

    async def _answer(self, received: Received) -> None:
        try:
            question = wire.decode(received.payload, AskOwner)
            is_owner = self._is_owner(question.tenant, question.request_id)
            await self._worker.broker.respond(received, wire.encode(Owner(is_owner=is_owner)))
        except (WireError, BrokerError) as error:
            logger.warning("question not answered: %s", error, extra={"action": "answer_lost"})
