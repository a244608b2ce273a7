"""The render process: takes submissions, publishes jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from headrace.render import renderer as renderers
from headrace.render.handler import RenderHandler
from headrace.shared import metrics, spans, subjects, wire
from headrace.shared.asks import answering
from headrace.shared.broker import Delivery, WorkQueue
from headrace.shared.contract import contract, served_name
from headrace.shared.deadlines import kept_s
from headrace.shared.ends import has_result, publish_end
from headrace.shared.errors import (
    BadRequestError,
    CancelledRequestError,
    EngineRequestError,
    MalformedMessageError,
    RequestError,
)
from headrace.shared.intake import Intake, Slots
from headrace.shared.owners import is_ended_by
from headrace.shared.readers import READER_GONE
from headrace.shared.settings import EngineKind, RenderSettings, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.submission import Submission, caller_of, keeps_result, reply_to_of
from headrace.shared.worker import Worker, joined, terminal_of

logger = logging.getLogger(__name__)


async def run(settings: Settings, *, engine: EngineKind, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then finish what was taken.

    Raises: HeadraceError when the renderer can't start.
    """
    async with joined(
        settings,
        Role.RENDER,
        model=served_name(settings),
        contract=contract(settings, engine=engine),
        slots=settings.render.slots,
        stop=stop,
    ) as worker:
        renderer = renderers.build(settings, engine)
        await renderer.start()
        try:
            handler = RenderHandler(
                renderer,
                worker.instance,
                tenant_cache_salt=settings.render.tenant_cache_salt,
                max_choices=settings.decode.max_choices,
            )
            await serve(worker, handler, renderer, stop, settings.render)
        finally:
            await renderer.close()


async def serve(
    worker: Worker,
    handler: RenderHandler,
    renderer: renderers.Renderer,
    stop: asyncio.Event,
    settings: RenderSettings,
) -> None:
    """Take submissions until `stop`."""
    slots = Slots(worker.slots)
    worker.describe = lambda: {
        "num_running": slots.total - slots.free,
        "max_model_len": renderer.max_model_len,
    }
    queues = [WorkQueue.req(worker.slug, lane) for lane in Lane]

    def read(delivery: Delivery) -> Submission:
        return Submission.from_received(
            delivery.subject,
            delivery.headers,
            delivery.payload,
            now=delivery.published,
            default_deadline_s=settings.deadlines_s,
            max_deadline_s=settings.max_deadline_s,
        )

    async def work(delivery: Delivery) -> None:
        try:
            submission = read(delivery)
        except MalformedMessageError as error:
            await refuse(worker, delivery, str(error))
            return
        async with delivery.keep_alive():
            if not await has_ended(worker, submission, delivery):
                await answer(worker, handler, submission)
            await delivery.ack()

    async def give_up(delivery: Delivery) -> None:
        error = EngineRequestError("this request made render fail")
        await end(worker, read(delivery), error)

    intake = Intake(
        worker.broker,
        queues,
        slots,
        lambda delivery: worker.settle(delivery, work, give_up),
        on_stop=lambda: worker.enter("draining"),
    )
    async with answering(worker, subjects.render_ask(worker.slug), renderer.ask, stop):
        await worker.enter("ready")
        await intake.run(stop)


async def refuse(worker: Worker, delivery: Delivery, reason: str) -> None:
    """Tell the caller what is wrong with a submission; keep one that does not even say whose it is."""
    try:
        tenant, lane, request_id = caller_of(delivery.subject, delivery.headers)
    except MalformedMessageError:
        await worker.dead_letter(delivery, reason)
        return
    terminal = terminal_of(request_id, BadRequestError(reason))
    reply_to = reply_to_of(delivery.headers, tenant)
    keeps = keeps_result(delivery.headers)
    await worker.publish_terminal(tenant, lane, terminal, reply_to=reply_to, keeps_result=keeps)
    await delivery.ack()


async def end(worker: Worker, submission: Submission, error: RequestError) -> None:
    """Publish the terminal of a submission of which there will be no job."""
    await publish_end(worker, submission, terminal_of(submission.request_id, error))


async def has_ended(worker: Worker, submission: Submission, delivery: Delivery) -> bool:
    """Whether a submission comes again after its end: then nothing is computed."""
    # Whoever published its end may have been killed before the ack, or the broker may have forgotten that.
    if delivery.num_delivered > 1 or worker.broker.back_at >= submission.accepted:
        # All of it: a worker that has not heard of the end goes on, and its chunks come behind that.
        answer = await worker.broker.replay(subjects.out(submission.tenant, submission.request_id))
        if any(is_ended_by(message, 0) for message in answer):
            return True
    if not await has_result(worker, submission):
        return False
    logger.info(
        "submitted again, and has its result",
        extra={"action": "render_has_result", "request_id": submission.request_id},
    )
    return True


def check_wanted(worker: Worker, submission: Submission) -> None:
    """Raises: CancelledRequestError when nobody waits for the answer any more."""
    reason = worker.cancels.reason(submission.tenant, submission.request_id, submission.accepted)
    reader = submission.reader if submission.lane is Lane.RT else None
    if reason is None and worker.readers.is_gone(reader):
        reason = READER_GONE
    if reason is not None:
        raise CancelledRequestError(f"request {submission.request_id} was cancelled: {reason}")


async def answer(worker: Worker, handler: RenderHandler, submission: Submission) -> None:
    """Publish the job of a submission, or the terminal that says why there is none."""
    started = time.monotonic()
    taken = time.time()
    traceparent, own = spans.begin_render(worker.tracer, submission)
    try:
        check_wanted(worker, submission)
        job = await handler.handle(replace(submission, traceparent=traceparent))
        check_wanted(worker, submission)  # meanwhile somebody may have changed their mind
        await worker.broker.publish_durable(
            subjects.job(worker.pool, job.tenant, job.lane),
            wire.encode(job),
            message_id=f"{job.tenant}.{job.request_id}.job",
            kept_s=kept_s(job.lane, job.deadline, time.time()),
        )
        worker.events.request("accepted", job.tenant, job.lane, job.request_id)
    except RequestError as error:
        await end(worker, submission, error)
        if isinstance(error, CancelledRequestError):
            metrics.CANCELS_EFFECTIVE.labels(worker.role).inc()
        spans.rendered(
            worker.tracer, submission, own, taken=taken, end=time.time(), error=error.code
        )
        logger.info(
            "request refused: %s",
            error.code,
            extra={"action": "render_refused", "request_id": submission.request_id},
        )
        return
    spans.rendered(
        worker.tracer, submission, own, taken=taken, end=job.published, timings=job.timings
    )
    logger.debug(
        "request rendered",
        extra={
            "action": "render_done",
            "request_id": job.request_id,
            "num_prompts": len(job.prompts),
            "num_prompt_token_ids": job.timings.num_prompt_token_ids,
            "seconds": round(time.monotonic() - started, 6),
        },
    )
