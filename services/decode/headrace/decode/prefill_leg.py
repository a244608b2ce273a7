"""Getting a prompt computed by a prefill worker."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from headrace.decode import handoff as handoffs
from headrace.decode.priority import engine_priority
from headrace.engine.interface import DecodeEngine, EngineInfo
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.errors import (
    BrokerError,
    HandoffError,
    NoWorkerError,
    RequestError,
    WireError,
)
from headrace.shared.messages import Handoff, Job, PrefillFailed, PrefillTask, Prompt
from headrace.shared.openai_errors import error_of
from headrace.shared.subjects import Role
from headrace.shared.token_ids import prompt_hash
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

LIVENESS_S = 0.5


class PrefillLeg:
    """Publishes prefill tasks and takes each one's answer, once; every other handoff is given back."""

    def __init__(
        self,
        worker: Worker,
        engine: DecodeEngine,
        info: EngineInfo,
        *,
        timeout_s: float,
        margin_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._info = info
        self._timeout_s = timeout_s
        self._margin_s = margin_s
        self._now = now
        self._waiting: dict[str, asyncio.Future[Handoff | PrefillFailed]] = {}
        self._tasks: dict[str, PrefillTask] = {}
        self._num_reconnects = 0
        self._releases: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribe to this worker's own reply subject."""
        self._worker.broker.on_reconnect(self._publish_again)
        await self._worker.broker.subscribe(subjects.kv(self._worker.instance), self._on_answer)

    @property
    def has_worker(self) -> bool:
        """True when a live prefill worker shares this worker's contract."""
        return bool(
            self._worker.table.ready(
                Role.PREFILL, slug=self._worker.slug, contract=self._worker.contract
            )
        )

    async def compute(self, job: Job, prompt: Prompt) -> Handoff:
        """Return a checked handoff of the prompt; the caller pulls it or calls `release`.

        Raises: NoWorkerError when no prefill worker is left or none answers in time, HandoffError,
        EngineRequestError and what else prefill reports.
        """
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
            priority=engine_priority(job),
            lane=job.lane,
            prompt_logprobs=prompt.prompt_logprobs,
        )
        answer: asyncio.Future[Handoff | PrefillFailed] = asyncio.get_running_loop().create_future()
        self._waiting[task.task_id] = answer
        try:
            self._tasks[task.task_id] = task
            await self._publish(task)
            result = await self._answer(answer, task)
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                self.release(answer.result())
            raise
        finally:
            self._waiting.pop(task.task_id, None)
            self._tasks.pop(task.task_id, None)
        if isinstance(result, PrefillFailed):
            raise error_of(result.failure)
        try:
            handoffs.check(
                result,
                task,
                self._info,
                contract=self._worker.contract,
                epoch=self._epoch_of(result.prefill_instance),
                now=self._now(),
                margin_s=self._margin_s,
            )
        except HandoffError as error:
            logger.warning(
                "handoff refused: %s",
                error,
                extra={
                    "action": "handoff_refused",
                    "reason": error.reason,
                    "request_id": job.request_id,
                },
            )
            self.release(result)
            raise
        return result

    def _epoch_of(self, prefill_instance: str) -> str | None:
        """Return the engine that a prefill worker has now, by its heartbeat. None: not heard of yet."""
        for worker in self._worker.table.workers():
            if worker.instance == prefill_instance:
                return worker.epoch
        return None

    async def _publish(self, task: PrefillTask, attempt: int = 0) -> None:
        await self._worker.broker.publish_durable(
            subjects.prefill(self._worker.pool, task.lane),
            wire.encode(task),
            message_id=f"{task.task_id}.{attempt}",
        )

    async def _publish_again(self) -> None:
        """While the broker was away, the task or its handoff may have been lost; of two handoffs one is taken."""
        self._num_reconnects += 1
        for task in list(self._tasks.values()):
            try:
                await self._publish(task, self._num_reconnects)
            except (BrokerError, RequestError) as error:
                logger.warning(
                    "prefill task not published again: %s",
                    error,
                    extra={"action": "prefill_retry_failed", "request_id": task.request_id},
                )

    async def _answer(
        self, answer: asyncio.Future[Handoff | PrefillFailed], task: PrefillTask
    ) -> Handoff | PrefillFailed:
        """Wait for the answer for as long as somebody may give it."""
        while True:
            remaining = task.expires - self._now()
            if remaining <= 0:
                raise NoWorkerError(
                    f"no prefill worker answered within {task.expires - task.published:.0f} s "
                    "(decode.prefill_timeout_s)"
                )
            done, _ = await asyncio.wait({answer}, timeout=min(LIVENESS_S, remaining))
            if done:
                return answer.result()
            if not self.has_worker:
                raise NoWorkerError("the last prefill worker is gone")

    def _on_answer(self, received: Received) -> None:
        try:
            answer = wire.decode(received.payload, Handoff, PrefillFailed)
        except WireError as error:
            logger.warning(
                "unreadable answer from prefill: %s", error, extra={"action": "handoff_unreadable"}
            )
            return
        future = self._waiting.pop(answer.task_id, None)
        if future is not None and not future.done():
            future.set_result(answer)
            return
        logger.warning(
            "handoff refused: nobody waits for task %s",
            answer.task_id,
            extra={
                "action": "handoff_refused",
                "reason": "unknown_task",
                "request_id": answer.request_id,
            },
        )
        self.release(answer)

    def release(self, answer: Handoff | PrefillFailed) -> None:
        """Give a handoff back that will not be pulled, so that prefill frees its blocks."""
        if isinstance(answer, Handoff):
            release = asyncio.create_task(self._release(answer))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _release(self, handoff: Handoff) -> None:
        try:
            await self._engine.release_handoff(handoff.kv_transfer_params)
        except (RequestError, HandoffError) as error:
            logger.warning(
                "handoff not released, its lease will end: %s",
                error,
                extra={"action": "handoff_release_failed", "request_id": handoff.request_id},
            )
