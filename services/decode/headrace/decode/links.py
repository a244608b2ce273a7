"""The links to derender workers: one a worker for all its streams, and given up when the worker is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.decode.frames import FrameLink
from headrace.shared import subjects, wire
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Credit, Frame, StreamGone
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

CHECK_S = 0.5
MAX_LINKS_REMEMBERED = 1_000


@dataclass(frozen=True, slots=True)
class _Live:
    link: FrameLink
    task: asyncio.Task[None]
    unwatch: Callable[[], None]


class Links:
    """Makes links on demand. A worker that is killed, says goodbye, or acknowledges nothing loses its link."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._live: dict[str, _Live] = {}
        self._last_seqs: dict[str, int] = {}

    def to(self, derender_instance: str) -> FrameLink:
        """Return the link to a derender worker."""
        live = self._live.get(derender_instance)
        if live is None:
            live = self._live[derender_instance] = self._open(derender_instance)
        return live.link

    def credit(self, credit: Credit) -> None:
        """A derender worker has worked off frames."""
        live = self._live.get(credit.derender_instance)
        if live is not None:
            live.link.credit(credit.seq)

    async def tell_gone(self, derender_instance: str, stream_id: int) -> None:
        """Tell a derender worker that it holds a stream in vain; it asks again when this is lost."""
        gone = StreamGone(decode_instance=self._worker.instance, stream_id=stream_id)
        try:
            await self._worker.broker.publish(subjects.frames(derender_instance), wire.encode(gone))
        except BrokerError as error:
            logger.warning("stream_gone not sent: %s", error, extra={"action": "gone_lost"})

    async def watch(self) -> None:
        """Give up the workers that said goodbye or fell silent, until cancelled."""
        alive: set[str] = set()
        while True:
            await asyncio.sleep(CHECK_S)
            before, alive = alive, {worker.instance for worker in self._worker.table.workers()}
            for instance, live in list(self._live.items()):
                if not self._worker.broker.is_connected:
                    live.link.pause()
                elif live.link.is_stalled or live.task.done() or instance in before - alive:
                    self._give_up(instance)
                else:
                    await live.link.probe()

    def close(self) -> None:
        """Send nothing more."""
        for live in self._live.values():
            live.unwatch()
            live.task.cancel()

    def _open(self, instance: str) -> _Live:
        async def send(frame: Frame) -> None:
            await self._worker.broker.publish(subjects.frames(instance), wire.encode(frame))

        link = FrameLink(
            self._worker.instance,
            instance,
            send,
            now=time.monotonic,
            first_seq=self._last_seqs.pop(instance, 0),
        )
        unwatch = self._worker.pulse.watch(instance, lambda: self._give_up(instance))
        return _Live(link, asyncio.create_task(link.run()), unwatch)

    def _give_up(self, instance: str) -> None:
        live = self._live.pop(instance, None)
        if live is None:
            return
        logger.warning(
            "derender worker %s is lost, its %d streams move",
            instance,
            live.link.num_streams,
            extra={"action": "derender_lost", "worker": instance},
        )
        self._last_seqs[instance] = live.link.seq
        while len(self._last_seqs) > MAX_LINKS_REMEMBERED:
            del self._last_seqs[next(iter(self._last_seqs))]
        live.unwatch()
        live.task.cancel()
        live.link.fail()
