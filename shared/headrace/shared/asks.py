"""Questions that a worker answers at once, beside its main work: a request over core NATS, one answer back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace.shared import wire
from headrace.shared.broker import Received
from headrace.shared.errors import (
    BadRequestError,
    BrokerError,
    ExpiredError,
    QueueFullError,
    RequestError,
    WireError,
)
from headrace.shared.messages import Ask, AskAnswer
from headrace.shared.openai_errors import error_body
from headrace.shared.tasks import spawn
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

SLOTS = 4
"""Questions answered at once; each may keep a thread busy."""
MAX_WAITING = 128
"""More are refused: their clients would be gone before their turn."""

Answerer = Callable[[Ask], Awaitable[bytes]]
"""Returns the body of the answer. Raises: RequestError."""


@asynccontextmanager
async def answering(
    worker: Worker, subject: str, answerer: Answerer, stop: asyncio.Event
) -> AsyncIterator[None]:
    """Answer the questions on `subject` until `stop` or the end of the block; then finish what was taken."""
    desk = AskDesk(worker, answerer)
    subscription = await worker.broker.subscribe(subject, desk.receive, queue=str(worker.role))

    async def close() -> None:
        await subscription.unsubscribe()
        await desk.finish()

    async def close_on_stop() -> None:
        await stop.wait()
        await close()

    closing = asyncio.create_task(close_on_stop())
    try:
        yield
    finally:
        if stop.is_set():
            await closing
        else:
            closing.cancel()
            await close()


class AskDesk:
    """Takes questions as they come; some at once, the others wait their turn or are refused."""

    def __init__(
        self,
        worker: Worker,
        answerer: Answerer,
        *,
        slots: int = SLOTS,
        max_waiting: int = MAX_WAITING,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._worker = worker
        self._answerer = answerer
        self._slots = asyncio.Semaphore(slots)
        self._capacity = slots + max_waiting
        self._now = now
        self._num_taken = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, received: Received) -> None:
        """Take one question; its answer goes out later."""
        if self._num_taken < self._capacity:
            self._num_taken += 1
            spawn(self._take(received), self._tasks)
        else:
            spawn(self._refuse(received), self._tasks)

    async def finish(self) -> None:
        """Wait until what was taken is answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _refuse(self, received: Received) -> None:
        error = QueueFullError(
            f"{self._worker.instance} has {self._capacity} questions to answer already"
        )
        await self._reply(received, _failed(error))

    async def _take(self, received: Received) -> None:
        try:
            async with self._slots:
                await self._work(received)
        finally:
            self._num_taken -= 1

    async def _work(self, received: Received) -> None:
        started = time.monotonic()
        try:
            ask = wire.decode(received.payload, Ask)
        except WireError as error:
            logger.warning("unreadable question: %s", error, extra={"action": "ask_unreadable"})
            await self._reply(received, _failed(BadRequestError(f"unreadable question: {error}")))
            return
        answer = await self._answer(ask)
        await self._reply(received, answer)
        logger.info(
            "question answered: %s, HTTP %d",
            ask.endpoint,
            answer.http_status,
            extra={
                "action": "ask_done",
                "request_id": ask.request_id,
                "endpoint": ask.endpoint,
                "http_status": answer.http_status,
                "seconds": round(time.monotonic() - started, 6),
            },
        )

    async def _answer(self, ask: Ask) -> AskAnswer:
        try:
            if self._now() > ask.deadline:
                raise ExpiredError(f"question {ask.request_id} waited past its deadline")
            return AskAnswer(http_status=200, body=await self._answerer(ask))
        except RequestError as error:
            return _failed(error)
        except Exception:
            # One question must not take the worker's streams and jobs with it.
            logger.exception(
                "question made this worker fail",
                extra={"action": "unexpected_error", "request_id": ask.request_id},
            )
            return _failed(RequestError("Internal server error"))

    async def _reply(self, received: Received, answer: AskAnswer) -> None:
        try:
            await self._worker.broker.respond(received, wire.encode(answer))
        except (BrokerError, RequestError) as error:
            logger.warning("answer not sent: %s", error, extra={"action": "answer_lost"})


def _failed(error: RequestError) -> AskAnswer:
    retry_after_s = error.retry_after_s if isinstance(error, QueueFullError) else None
    return AskAnswer(
        http_status=error.http_status, body=error_body(error), retry_after_s=retry_after_s
    )
