"""Generating one job's answer, until it ends or there is no reason to go on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from headrace.decode.handler import DecodeHandler, Stopwatch
from headrace.decode.stream import Stream
from headrace.decode.takeover import Start
from headrace.shared.errors import CancelledRequestError, EngineRequestError, ExpiredError
from headrace.shared.messages import Job
from headrace.shared.readers import READER_GONE
from headrace.shared.subjects import Lane
from headrace.shared.worker import Worker


async def generate(
    worker: Worker,
    handler: DecodeHandler,
    job: Job,
    stream: Stream,
    start: Start,
    watch: Stopwatch,
    delivery: asyncio.Task[None],
) -> None:
    """Generate until the end, the deadline, a cancel, or a derender worker's refusal, which ends `delivery`.

    Raises: RequestError where that is not the answer's own end.
    """
    reason = worker.cancels.reason(job.tenant, job.request_id, job.timings.accepted)
    reader = job.reader if job.lane is Lane.RT else None
    if reason is None and worker.readers.is_gone(reader):
        reason = READER_GONE
    if reason is not None:
        raise CancelledRequestError(f"request {job.request_id} was cancelled: {reason}")
    remaining = job.deadline - time.time()
    if remaining <= 0:
        raise ExpiredError(f"request {job.request_id} waited for decode past its deadline")
    rest = job if start.continuation is None else start.continuation.rest
    if rest is None:
        return  # all of it was generated before
    work = asyncio.create_task(handler.generate(rest, stream, watch))
    cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    worker.cancels.watch(job.tenant, job.request_id, cancelled.set_result)
    unwatch = worker.readers.watch(
        reader, lambda: worker.cancel(job.tenant, job.request_id, READER_GONE)
    )
    try:
        ends: set[asyncio.Future[Any]] = {work, cancelled, delivery}
        await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        elif cancelled.done():
            raise CancelledRequestError(
                f"request {job.request_id} was cancelled: {cancelled.result()}"
            )
        elif delivery.done():
            delivery.result()
            raise EngineRequestError("the answer was ended before it was generated")
        else:
            raise ExpiredError(f"request {job.request_id} ran past its deadline")
    finally:
        unwatch()
        worker.cancels.unwatch(job.tenant, job.request_id, cancelled.set_result)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
