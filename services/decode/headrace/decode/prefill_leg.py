"""Getting a prompt computed by a prefill worker."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Set
from typing import Any

from headrace.decode import handoff as handoffs
from headrace.decode.handoff_inbox import HandoffInbox, log_refused
from headrace.decode.peers import Peers
from headrace.decode.pending import AttemptFailedError, Pending
from headrace.engine.interface import DecodeEngine, EngineInfo
from headrace.engine.priorities import engine_priority
from headrace.shared import spans, subjects, wire
from headrace.shared.errors import (
    BrokerError,
    ExpiredError,
    HandoffError,
    NoWorkerError,
    QueueFullError,
    RequestError,
)
from headrace.shared.messages import (
    Handoff,
    Heartbeat,
    Job,
    PrefillFailed,
    PrefillTask,
    Prompt,
)
from headrace.shared.openai_errors import error_of
from headrace.shared.subjects import Role
from headrace.shared.tasks import spawn
from headrace.shared.token_ids import prompt_hash
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)


class PrefillLeg:
    """Publishes prefill tasks and takes each one's answer, once; every other handoff is given back."""

    def __init__(
        self,
        worker: Worker,
        engine: DecodeEngine,
        info: EngineInfo,
        peers: Peers,
        *,
        timeout_s: float,
        margin_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._worker = worker
        self._info = info
        self._peers = peers
        self._timeout_s = timeout_s
        self._margin_s = margin_s
        self._now = now
        self._inbox = HandoffInbox(worker, engine)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on this worker's own subject."""
        self._worker.broker.on_reconnect(self._publish_all_again)
        await self._inbox.start()

    def has_worker(self, failed: Set[str] = frozenset()) -> bool:
        """Whether a prefill worker that is not among the `failed` ones can be asked."""
        return bool(self._usable(failed))

    async def compute(self, job: Job, prompt: Prompt, failed: set[str]) -> Handoff:
        """Return a checked handoff of the prompt; the caller pulls it or calls `release`.

        `failed` are prefill workers that are not asked for this prompt any more; whoever fails it now is added.
        Raises: NoWorkerError when nobody is left to ask or nobody answers in time, AttemptFailedError or
        HandoffError when it is worth another attempt, and what else prefill reports.
        """
        usable = self._usable(failed)
        if not usable:
            raise NoWorkerError("no prefill worker is left for this prompt")
        pending = self._pend(job, prompt, usable)
        self._inbox.pending[pending.task.task_id] = pending
        candidates = [worker.instance for worker in usable]
        error: str | None = "no_answer"
        pending.watch(self._worker.pulse, [pending.target] if pending.target else candidates)
        try:
            await self._publish(pending)
            result = await self._answered(pending, failed)
            error = result.failure.code if isinstance(result, PrefillFailed) else None
        except asyncio.CancelledError:
            if pending.answer.done() and not pending.answer.cancelled():
                self._inbox.release(pending.answer.result())
            raise
        finally:
            spans.waited_for_prefill(self._worker.tracer, job, pending.task, self._now(), error)
            pending.unwatch()
            del self._inbox.pending[pending.task.task_id]
        if isinstance(result, PrefillFailed):
            raise self._reported(result, job, failed)
        self._check(result, pending.task, failed)
        return result

    def pulled(self, handoff: Handoff) -> None:
        """Note that a pull from this prefill worker succeeded."""
        self._peers.pulled(handoff.prefill_instance)

    def not_pulled(self, handoff: Handoff) -> None:
        """Note a pull that failed; a prefill worker with several of them is not asked for a while."""
        self._peers.not_pulled(handoff.prefill_instance)

    def release(self, handoff: Handoff) -> None:
        """Give a handoff back that will not be pulled, so that prefill frees its blocks."""
        self._inbox.release(handoff)

    def _ready(self) -> list[Heartbeat]:
        return self._worker.table.ready(
            Role.PREFILL, slug=self._worker.slug, contract=self._worker.contract
        )

    def _usable(self, failed: Set[str]) -> list[Heartbeat]:
        return [
            worker
            for worker in self._ready()
            if worker.instance not in failed and self._peers.is_usable(worker.instance)
        ]

    def _pend(self, job: Job, prompt: Prompt, usable: list[Heartbeat]) -> Pending:
        """Make the task; where not every worker may take it, it is for the one with the least to do."""
        target = None
        if len(usable) < len(self._ready()):
            target = min(usable, key=self._load).instance
        now = self._now()
        task = PrefillTask(
            task_id=uuid.uuid4().hex,
            request_id=job.request_id,
            tenant=job.tenant,
            decode_instance=self._worker.instance,
            published=now,
            expires=min(job.deadline, now + self._timeout_s),
            contract=self._worker.contract,
            token_ids=prompt.token_ids,
            prompt_hash=prompt_hash(prompt.token_ids, prompt.cache_salt),
            cache_salt=prompt.cache_salt,
            priority=engine_priority(job.lane, job.priority),
            lane=job.lane,
            prompt_logprobs=prompt.prompt_logprobs,
            traceparent=self._worker.tracer.child(job.traceparent),
        )
        return Pending(
            task=task,
            target=target,
            answer=asyncio.get_running_loop().create_future(),
            publish_again=lambda: spawn(
                self._publish_again(self._inbox.pending[task.task_id]), self._tasks
            ),
        )

    def _load(self, worker: Heartbeat) -> tuple[float, float]:
        num_sent = sum(
            pending.target == worker.instance for pending in self._inbox.pending.values()
        )
        return (worker.num_running + num_sent) / worker.slots, random.random()

    async def _publish(self, pending: Pending) -> None:
        """Raises: NoWorkerError when the broker takes no tasks: the prompt is better computed here."""
        task, pool = pending.task, self._worker.pool
        pending.num_published += 1
        worker = pending.starter or pending.target
        subject = (
            subjects.prefill(pool, task.lane)
            if worker is None
            else subjects.prefill_worker(pool, worker)
        )
        try:
            await self._worker.broker.publish_durable(
                subject,
                wire.encode(task),
                message_id=f"{task.task_id}.{pending.num_published - 1}",
            )
        except (BrokerError, QueueFullError) as error:
            raise NoWorkerError(f"the task reaches no prefill worker: {error}") from None

    async def _publish_all_again(self) -> None:
        """While this worker was away, tasks that nobody had taken may have been lost; of two answers one is taken.

        And who computes one may have given it up, as nobody seemed to wait; if not, it drops the copy.
        """
        for pending in list(self._inbox.pending.values()):
            await self._publish_again(pending)

    async def _publish_again(self, pending: Pending) -> None:
        try:
            await self._publish(pending)
        except RequestError as error:
            logger.warning(
                "prefill task not published again: %s",
                error,
                extra={
                    "action": "prefill_retry_failed",
                    "request_id": pending.task.request_id,
                },
            )

    async def _answered(self, pending: Pending, failed: set[str]) -> Handoff | PrefillFailed:
        """Wait for the answer for as long as somebody may give it."""
        task = pending.task
        nobody = asyncio.create_task(
            self._worker.table.wait_for(lambda _: self._is_left_alone(pending, failed))
        )
        ends: set[asyncio.Future[Any]] = {pending.answer, nobody}
        try:
            await asyncio.wait(
                ends,
                timeout=max(0.0, task.expires - self._now()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            nobody.cancel()
        if pending.answer.done():
            answer = pending.answer.result()
            if answer is not None:
                return answer
        elif not nobody.done():
            raise NoWorkerError(
                f"no prefill worker answered within {task.expires - task.published:.0f} s "
                "(decode.prefill_timeout_s)"
            )
        lost = pending.starter or pending.target
        if lost is None:
            raise NoWorkerError("the last prefill worker is gone")
        failed.add(lost)
        raise self._failed(task, f"prefill worker {lost} is gone, or brought what was used")

    def _is_left_alone(self, pending: Pending, failed: Set[str]) -> bool:
        """Whether nobody will take the task; once it was started, its worker's pulse tells."""
        if pending.starter is not None:
            return False
        usable = {worker.instance for worker in self._usable(failed)}
        return not usable if pending.target is None else pending.target not in usable

    def _failed(self, task: PrefillTask, why: str) -> AttemptFailedError:
        logger.warning(
            "prefill attempt failed: %s",
            why,
            extra={"action": "prefill_attempt_failed", "request_id": task.request_id},
        )
        return AttemptFailedError(why)

    def _reported(self, answer: PrefillFailed, job: Job, failed: set[str]) -> RequestError:
        """Return what a failure that prefill reports means for the request."""
        error = error_of(answer.failure)
        if answer.failure.code == ExpiredError.code and self._now() < job.deadline:
            return NoWorkerError(f"no prefill worker was quick enough: {error}")
        if not error.retryable:
            return error
        failed.add(answer.prefill_instance)
        return AttemptFailedError(str(error))

    def _check(self, handoff: Handoff, task: PrefillTask, failed: set[str]) -> None:
        table = self._worker.table
        epochs = {worker.instance: worker.epoch for worker in table.workers()}
        try:
            handoffs.check(
                handoff,
                task,
                self._info,
                contract=self._worker.contract,
                epoch=epochs.get(handoff.prefill_instance),
                now=self._now(),
                margin_s=self._margin_s,
                clock_offset_s=table.clock_offset(handoff.prefill_instance),
            )
        except HandoffError as error:
            log_refused(handoff, error.reason, str(error))
            failed.add(handoff.prefill_instance)
            self.release(handoff)
            raise
