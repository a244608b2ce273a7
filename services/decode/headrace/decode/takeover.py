"""A job that had an owner before: what was answered so far, and how its next owner begins."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.decode.continuation import Continuation, continued, is_whole
from headrace.engine.interface import DecodeEngine
from headrace.shared import subjects, wire
from headrace.shared.broker import Received
from headrace.shared.ends import has_result, publish_end
from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import Chunk, Job, Takeover, Terminal
from headrace.shared.owners import Owners, message_of
from headrace.shared.worker import Worker, terminal_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How an owner begins."""

    epoch: int  #: whose answer it is from here on
    continuation: Continuation | None = None  #: None: from the first token ID


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What `out` holds of an answer."""

    chunks: tuple[Chunk, ...] = ()  #: those that count, in order
    terminal: Terminal | None = None  #: the first that counts
    epoch: int = 0  #: the latest owner's
    last: int = 0  #: stream sequence of the last message, whatever it is; 0: there is none


def seen(messages: Iterable[Received]) -> Seen:
    """Return what these messages of one `out` subject say, by the rule of `Owners`.

    One that can't be read is missing, here as for the client.
    """
    owners, epoch, last = Owners(), 0, 0
    answers: list[Chunk | Terminal] = []
    for received in messages:
        last = int(received.headers["Nats-Sequence"])
        message = message_of(received)
        if message is None:
            continue
        epoch = max(epoch, message.epoch)
        if isinstance(message, Takeover):
            owners.take_over(message)
        else:
            answers.append(message)
    counting = [message for message in answers if not owners.is_void(message)]
    chunks = {message.seq: message for message in counting if isinstance(message, Chunk)}
    terminals = [message for message in counting if isinstance(message, Terminal)]
    return Seen(
        chunks=tuple(chunks[seq] for seq in sorted(chunks)),
        terminal=terminals[0] if terminals else None,
        epoch=epoch,
        last=last,
    )


class Succession:
    """Takes jobs over, and tells whether one was taken over since."""

    def __init__(self, worker: Worker, engine: DecodeEngine) -> None:
        self._worker = worker
        self._engine = engine

    async def begin(self, job: Job, num_delivered: int) -> Start | None:
        """Become the owner of a job that others had, or return None: it has ended, now at the latest.

        Where going on behind what was seen is not exact, the request ends with an error.
        Raises: BrokerError.
        """
        if await has_result(self._worker, job):
            return None
        # 2 at least: a first owner may be there of whom the broker has forgotten everything.
        epoch = max(2, num_delivered, (await self._seen(job)).epoch + 1)
        # Whoever answers still has to fall silent, or another message would always come in between.
        await self._broadcast(self._takeover(job, epoch, 0))
        while True:
            before = await self._seen(job)
            if before.terminal is not None:
                return None
            if before.epoch >= epoch:  # somebody was quicker: this one's name is taken
                epoch = before.epoch + 1
                await self._broadcast(self._takeover(job, epoch, 0))
            continuation = None
            # Without its beginning, which a killed broker forgot, nothing of an answer is of use: it is made anew.
            chunks = before.chunks if is_whole(before.chunks) else ()
            if chunks:
                continuation = continued(job, chunks, self._engine)
            seq = len(chunks)
            if await self._store(self._takeover(job, epoch, seq), before.last):
                break
        if chunks and continuation is None:
            await self._end(job, epoch, seq)
            return None
        return Start(epoch=epoch, continuation=continuation)

    async def later_owner(self, job: Job, epoch: int) -> int:
        """Return the last owner, if it is a later one than the `epoch`-th; 0: it is not. Raises: BrokerError."""
        last = (await self._seen(job)).epoch
        return last if last > epoch else 0

    async def _seen(self, job: Job) -> Seen:
        subject = subjects.out(job.tenant, job.request_id)
        return seen(await self._worker.broker.replay(subject))

    def _takeover(self, job: Job, epoch: int, seq: int) -> Takeover:
        return Takeover(
            request_id=job.request_id,
            tenant=job.tenant,
            epoch=epoch,
            seq=seq,
            decode_instance=self._worker.instance,
        )

    async def _broadcast(self, takeover: Takeover) -> None:
        subject = subjects.takeover(takeover.tenant, takeover.request_id)
        await self._worker.broker.publish(subject, wire.encode(takeover))

    async def _store(self, takeover: Takeover, last: int) -> bool:
        """Publish it on `out`; False when anything was published there since it was read."""
        is_stored = await self._worker.outbox.publish_durable(
            subjects.out(takeover.tenant, takeover.request_id),
            wire.encode(takeover),
            message_id=f"{takeover.tenant}.{takeover.request_id}.takeover.{takeover.epoch}",
            expect_last=last,
        )
        if is_stored:
            logger.info(
                "job taken over behind %d messages of its answer",
                takeover.seq,
                extra={
                    "action": "job_taken_over",
                    "request_id": takeover.request_id,
                    "epoch": takeover.epoch,
                },
            )
        return is_stored

    async def _end(self, job: Job, epoch: int, seq: int) -> None:
        error = EngineRequestError(
            "the decode worker of this request ended in the middle of the answer"
        )
        terminal = terminal_of(job.request_id, error, seq=seq, epoch=epoch, timings=job.timings)
        await publish_end(self._worker, job, terminal)
