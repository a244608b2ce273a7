"""What a derender worker says to the decode workers whose streams it holds."""

from __future__ import annotations

import asyncio
import logging

from headrace.derender.steps import StreamKey
from headrace.shared import subjects, wire
from headrace.shared.errors import BrokerError
from headrace.shared.messages import (
    Credit,
    Frame,
    Resync,
    StopChoice,
    StreamDone,
    StreamUnknown,
)
from headrace.shared.wire import Message
from headrace.shared.worker import Worker

logger = logging.getLogger(__name__)

CREDIT_FRAMES = 32
"""A credit goes back after so many frames at the latest."""
CREDIT_ENTRIES = 64
"""Or after so many entries."""
CREDIT_S = 0.2
"""And so long after a frame at the latest."""


class Control:
    """Sends control messages; decode sends again what brings about one that is lost."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ask_again(self, key: StreamKey, index: int) -> None:
        """Ask for a stream's entries from `index` on."""
        instance = self._worker.instance
        await self.tell(key[0], Resync(stream_id=key[1], index=index, derender_instance=instance))

    async def stop(self, key: StreamKey, choice: int) -> None:
        """Let decode generate no more of a choice."""
        await self.tell(key[0], StopChoice(stream_id=key[1], choice=choice))

    async def done(self, key: StreamKey) -> None:
        """Say that a stream's terminal is published."""
        await self.tell(key[0], StreamDone(stream_id=key[1]))

    async def unknown(self, key: StreamKey) -> None:
        """Say that a stream is not held here."""
        instance = self._worker.instance
        await self.tell(key[0], StreamUnknown(derender_instance=instance, stream_id=key[1]))

    async def credit(self, decode: str, seq: int) -> None:
        """Say that all frames up to this one are worked off."""
        await self.tell(decode, Credit(derender_instance=self._worker.instance, seq=seq))

    async def tell(self, decode: str, message: Message) -> None:
        """Send one message to a decode worker."""
        try:
            await self._worker.broker.publish(subjects.ctl(decode), wire.encode(message))
        except BrokerError as error:
            logger.warning("control message not sent: %s", error, extra={"action": "control_lost"})


class Credits:
    """Which frames of each decode worker are worked off, and which of them it was told of."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._seen: dict[str, int] = {}
        self._credited: dict[str, int] = {}
        self._num_entries: dict[str, int] = {}  # since then

    async def worked_off(self, frame: Frame) -> None:
        """Note a frame; its sender is told at once if it asks, or if it is the last of many."""
        decode = frame.decode_instance
        self._seen[decode] = max(frame.seq, self._seen.get(decode, 0))
        num_entries = self._num_entries.get(decode, 0) + len(frame.tokens)
        self._num_entries[decode] = num_entries
        num_frames = self._seen[decode] - self._credited.get(decode, 0)
        is_probe = not frame.tokens and not frame.ends
        if is_probe or num_frames >= CREDIT_FRAMES or num_entries >= CREDIT_ENTRIES:
            await self._credit(decode)

    async def run(self) -> None:
        """Acknowledge the last frames of each burst, until cancelled."""
        while True:
            await asyncio.sleep(CREDIT_S)
            for decode, seq in list(self._seen.items()):
                if seq > self._credited.get(decode, 0):
                    await self._credit(decode)

    def forget(self, decode: str) -> None:
        """Forget a decode worker that is gone."""
        self._seen.pop(decode, None)
        self._credited.pop(decode, None)
        self._num_entries.pop(decode, None)

    async def _credit(self, decode: str) -> None:
        self._credited[decode] = self._seen[decode]
        self._num_entries[decode] = 0
        await self._control.credit(decode, self._seen[decode])
