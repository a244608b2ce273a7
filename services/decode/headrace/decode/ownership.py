"""Which jobs are this worker's, and how it learns that one is not any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from headrace.decode.elsewhere import Elsewhere
from headrace.decode.owned import Absences, JobKey, Owned
from headrace.decode.takeover import Succession
from headrace.shared import subjects
from headrace.shared.broker import Delivery, Received
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Job
from headrace.shared.owners import announced
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

CHECK_S = 0.5


class Ownership:
    """The jobs in this worker's hands.

    Another worker that takes one over says so to all. Who was away may not have heard it, and reads what was
    published of the answer: soon after an absence, and before it ends or acks the job at the latest.
    """

    def __init__(self, worker: Worker, succession: Succession) -> None:
        self._worker = worker
        self._succession = succession
        self._owned: dict[JobKey, Owned] = {}
        self._absences = Absences(lambda: worker.broker.num_losses)
        self._elsewhere = Elsewhere(worker, self._has)

    async def start(self) -> None:
        """Listen for takeovers, and answer who asks. Raises: BrokerError."""
        await self._worker.broker.subscribe(subjects.takeover_all(), self._on_takeover)
        await self._elsewhere.start()

    def get(self, job: Job) -> Owned | None:
        """Return the job as it is owned here, if it is."""
        return self._owned.get((job.tenant, job.request_id))

    async def settled(self, job: Job, delivery: Delivery) -> bool:
        """Settle a job that came again to the worker that has it, as it ends there.

        False: it is to be worked on, now by this delivery; nobody else has a later one. Raises: BrokerError.
        """
        while (owned := self.get(job)) is not None:
            if await asyncio.shield(owned.ended):
                await delivery.ack()
                return True
            if not owned.is_superseded:
                await self._worker.hand_back(delivery)
                return True
            if owned.superseded_by > delivery.num_delivered:
                return True  # by a delivery after this one: it is another worker's, and not to be disturbed
        return False

    async def is_elsewhere(self, job: Job) -> bool:
        """Whether another worker has the job, answers, and will end it. Raises: BrokerError."""
        return await self._elsewhere.has(job)

    @contextlib.contextmanager
    def hold(self, job: Job, epoch: int) -> Iterator[Owned]:
        """Own a job while the block runs, in the current task."""
        task = asyncio.current_task()
        assert task is not None
        owned = Owned(job=job, epoch=epoch, num_absences=self._absences.count(), task=task)
        self._owned[job.tenant, job.request_id] = owned
        try:
            yield owned
        finally:
            if self.get(job) is owned:
                del self._owned[job.tenant, job.request_id]
            if not owned.ended.done():
                owned.ended.set_result(False)

    async def check(self, owned: Owned) -> None:
        """Let go of a job that was taken over while this worker was away. Raises: BrokerError."""
        num_absences = self._absences.count()
        if num_absences == owned.num_absences:
            return
        if epoch := await self._succession.later_owner(owned.job, owned.epoch):
            owned.supersede(epoch)
            await asyncio.sleep(0)  # the cancel comes through here, where it is this job's own task
        owned.num_absences = num_absences

    async def doubt(self, owned: Owned) -> bool:
        """Let go of a job if it was taken over; return False when it was not, or nothing can be read."""
        try:
            if epoch := await self._succession.later_owner(owned.job, owned.epoch):
                owned.supersede(epoch)
                return True
        except BrokerError as error:
            logger.warning("job not checked: %s", error, extra={"action": "check_failed"})
        return False

    async def watch(self) -> None:
        """Check the jobs after each absence, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self._elsewhere.look()
            self._absences.count()
            for owned in list(self._owned.values()):
                try:
                    await self.check(owned)
                except BrokerError as error:  # checked again before the ack at the latest
                    logger.warning("job not checked: %s", error, extra={"action": "check_failed"})

    def _has(self, tenant: str, request_id: str) -> bool:
        owned = self._owned.get((tenant, request_id))
        return owned is not None and owned.is_kept

    def _on_takeover(self, received: Received) -> None:
        takeover = announced(received)
        if takeover is None:
            return
        owned = self._owned.get((takeover.tenant, takeover.request_id))
        is_own = takeover.decode_instance == self._worker.instance
        if owned is not None and not is_own and takeover.epoch > owned.epoch:
            owned.supersede(takeover.epoch)
