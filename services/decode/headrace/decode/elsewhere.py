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
MEET_S = 1.0
"""After the broker is back, until everybody who lives has said so: each connects again within half of it."""


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

        After the broker was away this waits for those that are not back yet, for at most `RECONNECT_GRACE_S`; and
        for `MEET_S` in any case, so that a newcomer hears of those that are on their way back, too.
        Raises: BrokerError when the broker was lost meanwhile: nobody knows then.
        """
        question = wire.encode(AskOwner(request_id=job.request_id, tenant=job.tenant))
        num_losses, now = self._worker.broker.num_losses, time.monotonic()
        since = time.time() - self._worker.broker.back_at
        said_no: set[str] = set()
        while True:
            asked = (self._known | self._there()) - said_no
            answers = {name: self._ask(name, question) for name in asked}
            found = dict(zip(answers, await asyncio.gather(*answers.values()), strict=True))
            if self._worker.broker.num_losses != num_losses:
                raise BrokerError(f"nobody could say who has request {job.request_id}")
            if any(found.values()):
                return True
            said_no |= {name for name, is_owner in found.items() if is_owner is False}
            passed = since + time.monotonic() - now
            if passed >= RECONNECT_GRACE_S or (passed >= MEET_S and asked <= said_no):
                return False
            await asyncio.sleep(PAUSE_S)

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
        """Return what it says; None: it does not, yet."""
        try:
            answer = await self._worker.broker.request(
                subjects.owner(instance), question, timeout_s=ANSWER_TIMEOUT_S
            )
            return wire.decode(answer, Owner).is_owner
        except (BrokerError, NoWorkerError, WireError) as error:
            logger.debug(
                "%s does not say what it has: %s",
                instance,
                error,
                extra={"action": "owner_unknown", "worker": instance},
            )
            return None

    def _on_question(self, received: Received) -> None:
        spawn(self._answer(received), self._tasks)

    async def _answer(self, received: Received) -> None:
        try:
            question = wire.decode(received.payload, AskOwner)
            is_owner = self._is_owner(question.tenant, question.request_id)
            await self._worker.broker.respond(received, wire.encode(Owner(is_owner=is_owner)))
        except (WireError, BrokerError) as error:
            logger.warning("question not answered: %s", error, extra={"action": "answer_lost"})
