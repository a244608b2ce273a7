"""The end of a request, as whoever has its submission or its job tells it: everywhere that the caller asked for."""

from __future__ import annotations

from headrace.shared import subjects, wire
from headrace.shared.messages import Job, Terminal
from headrace.shared.submission import Submission
from headrace.shared.worker import Worker


async def publish_end(worker: Worker, asked: Submission | Job, terminal: Terminal) -> None:
    """End a request. Raises: as `Worker.publish_terminal`."""
    await worker.publish_terminal(
        asked.tenant,
        asked.lane,
        terminal,
        reply_to=asked.reply_to,
        keeps_result=asked.keeps_result,
    )


async def has_result(worker: Worker, asked: Submission | Job) -> bool:
    """Whether the result of a request that keeps it is stored; then whoever waits for it is told.

    Raises: BrokerError.
    """
    if not asked.is_kept:
        return False
    stored = await worker.broker.last(subjects.res(asked.tenant, asked.request_id))
    if stored is None:
        return False
    # Whoever kept it may have been killed before the reader of `out` was told.
    await publish_end(worker, asked, wire.decode(stored.payload, Terminal))
    return True
