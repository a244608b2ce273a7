"""A dead letter tried again: as a request that was accepted just now, on its own subject.

Its caller was told `error`, and the first end of a request counts. So the end is taken out first, with what else is
kept of the answer; whoever asks for the result later gets that of the new run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from headrace.cli.dlq.letters import STREAM, Letter
from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received
from headrace.shared.broker.blobs import BLOB_HEADER
from headrace.shared.errors import BrokerError, HeadraceError, RequestError, WireError
from headrace.shared.messages import Job, PrefillTask, Terminal
from headrace.shared.subjects import Lane, Role
from headrace.shared.submission import Submission
from headrace.shared.workers import WorkerTable

WORKER_TIMEOUT_S = 3.0
DEDUPE_S = 120.0  # the streams' duplicate_window


class NotReplayedError(HeadraceError):
    """This dead letter is not tried again; it stays where it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What is published."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]


async def replay(
    broker: Broker,
    table: WorkerTable,
    letter: Letter,
    *,
    anew: bool = False,
    now: Callable[[], float] = time.time,
) -> str:
    """Publish what was put aside once more, take the letter out, and return the subject.

    `anew`: let render make a job again, as after a change of the contract.
    Raises: NotReplayedError, DeniedError; BrokerError or QueueFullError when it was not published.
    """
    message = _message(letter, now(), anew=anew)
    await _check_workers(table, message.subject)
    end = await _check_ended(broker, letter)
    if isinstance(letter.request, Submission | Job):
        await _forget_answer(broker, letter.request, end)
    try:
        # The letter's own message ID: two operators at the same time run it once.
        await broker.publish_durable(
            message.subject,
            message.payload,
            message_id=f"replay.{letter.id}.{letter.stored:.6f}",
            headers=message.headers,
        )
    except (BrokerError, RequestError):
        if end is not None:  # or its caller would have no end at all
            await broker.publish_durable(
                end.subject,
                end.payload,
                message_id=f"replay.{letter.id}.{now():.6f}.end",
                expect_last=0,
            )
        raise
    await broker.admin.delete(STREAM, letter.id)
    return message.subject


def _message(letter: Letter, now: float, *, anew: bool) -> Message:
    """Return what to publish: the request as accepted now, with as much time as it had. Raises: NotReplayedError."""
    if letter.content is None:
        raise NotReplayedError("it can't be read by this release")
    content, request = letter.content, letter.request
    if BLOB_HEADER in content.headers:  # left there by whoever could not read it
        raise NotReplayedError("its payload was gone already when it was put aside")
    if isinstance(request, PrefillTask) or letter.stage == Role.PREFILL:
        raise NotReplayedError("nobody waits for a prefill task: decode went on without it")
    if isinstance(request, Job):
        parts = content.subject.split(".")
        if content.subject != subjects.job(parts[3], request.tenant, request.lane):
            raise NotReplayedError(f"its job is of tenant {request.tenant}, and not of its subject")
        job = renewed(request, now)
        if not anew:
            return Message(subject=content.subject, payload=wire.encode(job), headers={})
        if now - request.published < DEDUPE_S:  # the job's message ID is that of the first one
            raise NotReplayedError(
                f"its job is not {DEDUPE_S:g} s old yet; the broker would drop the new one"
            )
        request = _submission(job)
    elif anew:
        raise NotReplayedError("it holds no job that render could make anew")
    elif isinstance(request, Submission):
        deadline = now + max(0.0, request.deadline - request.accepted)
        request = dataclasses.replace(request, accepted=now, deadline=deadline, reader=None)
    else:  # perhaps a release that reads it has started since
        # Without what the broker reads: it was for the first publish, as a message ID or an expected sequence.
        headers = {k: v for k, v in content.headers.items() if not k.startswith("Nats-")}
        return Message(subject=content.subject, payload=content.payload, headers=headers)
    return Message(subject=request.subject, payload=request.body, headers=request.to_headers())


def renewed(job: Job, now: float) -> Job:
    """Return a job as if its request had been accepted now (Unix seconds)."""
    accepted = job.published if job.timings.accepted is None else job.timings.accepted
    return msgspec.structs.replace(
        job,
        published=now,
        deadline=now + max(0.0, job.deadline - accepted),
        reader=None,  # it left when it was told `error`; the operator wants the job
        timings=msgspec.structs.replace(job.timings, accepted=now),
    )


def _submission(job: Job) -> Submission:
    return Submission(
        request_id=job.request_id,
        tenant=job.tenant,
        slug=subjects.model_slug(job.model),
        lane=job.lane,
        endpoint=job.endpoint,
        deadline=job.deadline,
        accepted=job.timings.accepted or job.published,
        body=job.body,
        traceparent=job.traceparent,
        reply_to=job.reply_to,
        is_own_id=job.is_own_id,
    )


async def _check_workers(table: WorkerTable, subject: str) -> None:
    """Raises: NotReplayedError when no ready worker would take it."""
    parts = subject.split(".")
    is_job = subject.startswith(f"{subjects.ROOT}.job.")

    def is_served(table: WorkerTable) -> bool:
        if not is_job:
            return bool(table.ready(Role.RENDER, slug=parts[4]))
        return any(
            subjects.pool(subjects.model_slug(beat.model), beat.contract) == parts[3]
            for beat in table.ready(Role.DECODE)
        )

    try:
        async with asyncio.timeout(WORKER_TIMEOUT_S):
            await table.wait_for(is_served)
    except TimeoutError:
        raise NotReplayedError(
            f"no ready decode worker of {parts[3]}: with other settings, --anew lets render make its job again"
            if is_job
            else f"no ready render worker of {parts[4]}"
        ) from None


async def _check_ended(broker: Broker, letter: Letter) -> Received | None:
    """Return the stored end of the request, which is an error. Raises: NotReplayedError for any other end."""
    request = letter.request
    if not isinstance(request, Submission | Job):
        return None
    if request.lane is Lane.RT:
        kept = await broker.replay(subjects.out(request.tenant, request.request_id))
    else:
        last = await broker.last(subjects.res(request.tenant, request.request_id))
        kept = [] if last is None else [last]
    for received in kept:
        try:
            terminal = wire.decode(received.payload, Terminal)
        except WireError:
            continue  # a part of the answer
        if terminal.status != "error":
            raise NotReplayedError(
                f"request {request.request_id} has its end ({terminal.status}): drop the letter"
            )
    return None if request.lane is Lane.RT or not kept else kept[0]


async def _forget_answer(broker: Broker, request: Submission | Job, end: Received | None) -> None:
    out = subjects.out(request.tenant, request.request_id)
    if end is not None:
        # This one, and not whatever is there by then: somebody may have replayed it meanwhile.
        await broker.admin.delete("HR_RES", int(end.headers["Nats-Sequence"]))
    answer = await broker.replay(out)
    if answer:
        last = int(answer[-1].headers["Nats-Sequence"])
        await broker.admin.purge("HR_OUT", out, up_to=last)
