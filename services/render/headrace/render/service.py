"""The render process: takes submissions, publishes jobs."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.render import renderer as renderers
from headrace.render.handler import RenderHandler
from headrace.shared import subjects, wire
from headrace.shared.asks import answering
from headrace.shared.broker import Delivery, WorkQueue
from headrace.shared.contract import contract, served_name
from headrace.shared.errors import (
    BadRequestError,
    CancelledRequestError,
    EngineRequestError,
    MalformedMessageError,
    RequestError,
)
from headrace.shared.intake import Intake, Slots
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Lane, Role
from headrace.shared.submission import Submission, caller_of
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
            await serve(worker, RenderHandler(renderer, worker.instance), renderer, stop)
        finally:
            await renderer.close()


async def serve(
    worker: Worker, handler: RenderHandler, renderer: renderers.Renderer, stop: asyncio.Event
) -> None:
    """Take submissions until `stop`."""
    slots = Slots(worker.slots)
    worker.describe = lambda: {
        "num_running": slots.total - slots.free,
        "max_model_len": renderer.max_model_len,
    }
    queues = [WorkQueue.req(worker.slug, lane) for lane in Lane]

    async def work(delivery: Delivery) -> None:
        try:
            submission = Submission.from_received(
                delivery.subject, delivery.headers, delivery.payload, now=delivery.published
            )
        except MalformedMessageError as error:
            await refuse(worker, delivery, str(error))
            return
        async with delivery.keep_alive():
            await answer(worker, handler, submission)
            await delivery.ack()

    async def give_up(delivery: Delivery) -> None:
        submission = Submission.from_received(
            delivery.subject, delivery.headers, delivery.payload, now=delivery.published
        )
        error = EngineRequestError("this request made render fail")
        await worker.publish_terminal(
            submission.tenant, submission.lane, terminal_of(submission.request_id, error)
        )

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
    await worker.publish_terminal(tenant, lane, terminal)
    await delivery.ack()


async def answer(worker: Worker, handler: RenderHandler, submission: Submission) -> None:
    """Publish the job of a submission, or the terminal that says why there is none."""
    started = time.monotonic()
    try:
        reason = worker.cancels.reason(
            submission.tenant, submission.request_id, submission.accepted
        )
        if reason is not None:
            raise CancelledRequestError(f"request {submission.request_id} was cancelled: {reason}")
        job = await handler.handle(submission)
        await worker.broker.publish_durable(
            subjects.job(worker.pool, job.lane),
            wire.encode(job),
            message_id=f"{job.tenant}.{job.request_id}.job",
        )
    except RequestError as error:
        await worker.publish_terminal(
            submission.tenant, submission.lane, terminal_of(submission.request_id, error)
        )
        logger.info(
            "request refused: %s",
            error.code,
            extra={"action": "render_refused", "request_id": submission.request_id},
        )
        return
    logger.info(
        "request rendered",
        extra={
            "action": "render_done",
            "request_id": job.request_id,
            "num_prompts": len(job.prompts),
            "num_prompt_token_ids": job.timings.num_prompt_token_ids,
            "seconds": round(time.monotonic() - started, 6),
        },
    )
