"""Frames: all that one engine step gave the streams of one derender worker, in one message."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.decode.stream_log import StreamLog
from headrace.shared.errors import BrokerError, RequestError
from headrace.shared.messages import Frame, StreamEnd, Tokens

logger = logging.getLogger(__name__)

WINDOW = 256
"""Frames that may be unacknowledged; beyond that, token IDs wait in their logs and travel in larger frames."""
WINDOW_ENTRIES = 256
"""Entries that may be unacknowledged, in more than two frames. A worker that lags gets what several steps
gave a stream as one entry, which costs it little more than one step's."""
MAX_FRAME_BYTES = 1 * 2**20
"""Bytes of token IDs and of prompts' logprobs a frame; more goes into the next."""
LOGPROB_BYTES = 16
"""Of one logprob on the wire, about."""
STALL_S = 3.0
"""A derender worker that acknowledges nothing for so long is given up."""
PROBE_S = 1.0
"""After so long without an acknowledgement, an empty frame asks for one."""


class FrameSource(Protocol):
    """A stream as its link sees it."""

    log: StreamLog
    end: StreamEnd | None

    def lost(self, derender_instance: str) -> None:
        """This derender worker is gone."""
        ...


class FrameLink:
    """Sends the entries of many streams to one derender worker, within the credits that it gives back."""

    def __init__(
        self,
        decode_instance: str,
        derender_instance: str,
        send: Callable[[Frame], Awaitable[None]],
        *,
        now: Callable[[], float],
        first_seq: int = 0,
    ) -> None:
        self._decode_instance = decode_instance
        self._derender_instance = derender_instance
        self._send = send
        self._now = now
        self._sources: dict[int, FrameSource] = {}
        self._cursors: dict[int, int] = {}
        self._dirty: dict[int, None] = {}
        self._ends_due: set[int] = set()
        self._wake = asyncio.Event()
        self._seq = first_seq  # a link that follows another one to the same worker goes on counting
        self._acked = first_seq
        self._open: deque[tuple[int, int]] = deque()  # frames under way: number, entries
        self._num_open_entries = 0
        self._progress = now()

    @property
    def seq(self) -> int:
        """The number of the last frame."""
        return self._seq

    @property
    def num_streams(self) -> int:
        """Streams on this link."""
        return len(self._sources)

    @property
    def is_stalled(self) -> bool:
        """True when the worker acknowledged nothing for `STALL_S` although it should have."""
        return self._seq > self._acked and self._now() - self._progress > STALL_S

    def attach(self, source: FrameSource) -> None:
        """Send this stream from its first entry on."""
        self._sources[source.log.stream_id] = source
        self._cursors[source.log.stream_id] = 0
        self._ends_due.add(source.log.stream_id)
        if len(source.log) or source.end is not None:
            self.notify(source.log.stream_id)

    def detach(self, stream_id: int) -> None:
        """Send no more of this stream."""
        self._sources.pop(stream_id, None)
        self._cursors.pop(stream_id, None)
        self._dirty.pop(stream_id, None)
        self._ends_due.discard(stream_id)

    def notify(self, stream_id: int) -> None:
        """The stream has new entries. Costs no task: the sender wakes once for all streams of a step."""
        if stream_id in self._sources:
            self._dirty[stream_id] = None
            self._wake.set()

    def send_end(self, stream_id: int) -> None:
        """Send the stream's end (again)."""
        if stream_id in self._sources:
            self._ends_due.add(stream_id)
            self.notify(stream_id)

    def resync(self, stream_id: int, index: int) -> None:
        """Send the stream again from entry `index`; a wrong number from the wire is cut to what there is."""
        source = self._sources.get(stream_id)
        if source is not None and (index < len(source.log) or source.end is not None):
            self._cursors[stream_id] = max(0, min(index, len(source.log)))
            self._ends_due.add(stream_id)
            self._close_up_to(self._seq)  # frames were lost, which nobody will acknowledge
            self.notify(stream_id)

    def credit(self, seq: int) -> None:
        """Frames up to `seq` are worked off."""
        if self._acked < seq <= self._seq:
            self._acked = seq
            self._progress = self._now()
            self._close_up_to(seq)
            self._wake.set()

    def fail(self) -> None:
        """Give the worker up: every stream looks for another."""
        for source in list(self._sources.values()):
            source.lost(self._derender_instance)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty and self._may_send():
                await self._try(self._next())

    async def probe(self) -> None:
        """Ask for an acknowledgement when one is overdue, in case it was lost."""
        if self._seq > self._acked and self._now() - self._progress > PROBE_S:
            await self._try(self._frame((), ()))

    def pause(self) -> None:
        """The broker is away: silence says nothing about the worker."""
        self._progress = self._now()

    def _may_send(self) -> bool:
        if len(self._open) < 2:
            return True
        return len(self._open) < WINDOW and self._num_open_entries < WINDOW_ENTRIES

    def _close_up_to(self, seq: int) -> None:
        while self._open and self._open[0][0] <= seq:
            self._num_open_entries -= self._open.popleft()[1]

    async def _try(self, frame: Frame) -> None:
        """Send a frame; one that is lost is missed by its receiver, who asks for it."""
        try:
            await self._send(frame)
        except (BrokerError, RequestError) as error:
            logger.warning("frame not sent: %s", error, extra={"action": "frame_lost"})

    def _next(self) -> Frame:
        tokens: list[Tokens] = []
        ends: list[StreamEnd] = []
        size = 0
        for stream_id in list(self._dirty):
            source = self._sources[stream_id]
            for entry in source.log.entries(self._cursors[stream_id]):
                tokens.append(entry)
                size += _size(entry)
                if size >= MAX_FRAME_BYTES:
                    break
            if tokens and tokens[-1].stream_id == stream_id:
                self._cursors[stream_id] = tokens[-1].index + 1
            if self._cursors[stream_id] < len(source.log):
                break
            if source.end is not None and stream_id in self._ends_due:
                self._ends_due.discard(stream_id)
                ends.append(source.end)
            del self._dirty[stream_id]
            if size >= MAX_FRAME_BYTES:
                break
        return self._frame(tuple(tokens), tuple(ends))

    def _frame(self, tokens: tuple[Tokens, ...], ends: tuple[StreamEnd, ...]) -> Frame:
        if self._seq == self._acked:
            self._progress = self._now()
        self._seq += 1
        self._open.append((self._seq, len(tokens)))
        self._num_open_entries += len(tokens)
        return Frame(decode_instance=self._decode_instance, seq=self._seq, tokens=tokens, ends=ends)


def _size(entry: Tokens) -> int:
    if entry.logprobs is None and entry.prompt_logprobs is None:
        return len(entry.token_ids)
    table = entry.prompt_logprobs
    of_table = 0 if table is None else len(table.token_ids) + len(table.logprobs) + len(table.ranks)
    of_rows = LOGPROB_BYTES * sum(len(row) for row in entry.logprobs or ())
    return len(entry.token_ids) + of_table + of_rows
