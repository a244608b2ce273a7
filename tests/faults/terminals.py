"""Every terminal that went over `out`: whether a request had two of them, and how far it had come."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from headrace.shared import subjects, wire
from headrace.shared.broker import Broker, Received
from headrace.shared.errors import BrokerError, WireError
from headrace.shared.messages import Chunk, Takeover, Terminal, Timings
from headrace.shared.owners import Owners

MAX_BODY_BYTES = 200
LOOK_AFTER_S = 0.5  # both ends are stored by then


class Terminals:
    """A reader of all answers, which keeps their ends alone."""

    def __init__(self) -> None:
        self.ends: dict[str, set[bytes]] = defaultdict(set)  #: request ID → its different ends
        self.timings: dict[str, Timings] = {}  #: request ID → those of its first terminal
        self.num_void = 0  #: ends of owners whose job had been taken over, which no reader heeds
        self._broker: Broker | None = None
        self._looking: set[asyncio.Task[None]] = set()

    async def start(self, broker: Broker) -> None:
        """Listen."""
        self._broker = broker
        await broker.subscribe(f"{subjects.ROOT}.out.*.*", self._see)

    async def settle(self) -> None:
        """Return when it is known of every end whether it counts."""
        while self._looking:
            await asyncio.wait(self._looking)

    def _see(self, received: Received) -> None:
        if b"terminal.v1" not in received.payload[:40]:
            return  # most are chunks: a reader's business
        try:
            terminal = wire.decode(received.payload, Terminal)
        except WireError:
            return
        ends = self.ends[terminal.request_id]
        self.timings.setdefault(terminal.request_id, terminal.timings)
        if _end(terminal) in ends:
            return
        ends.add(_end(terminal))
        if len(ends) > 1:
            task = asyncio.create_task(self._look(received.subject, ends))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, subject: str, ends: set[bytes]) -> None:
        """Forget the ends that a takeover has made void, as every reader does."""
        assert self._broker is not None
        await asyncio.sleep(LOOK_AFTER_S)
        try:
            stored = await self._broker.replay(subject)
        except BrokerError:
            return  # then all of them are told
        messages = [wire.decode(r.payload, Chunk, Terminal, Takeover) for r in stored]
        owners = Owners()
        for message in messages:
            if isinstance(message, Takeover):
                owners.take_over(message)
        terminals = [message for message in messages if isinstance(message, Terminal)]
        void = {_end(terminal) for terminal in terminals if owners.is_void(terminal)}
        void -= {_end(terminal) for terminal in terminals if not owners.is_void(terminal)}
        self.num_void += len(void & ends)
        ends -= void


def _end(terminal: Terminal) -> bytes:
    head = f"{terminal.status} {terminal.http_status} ".encode()
    if terminal.status == "cancelled":
        return head  # two stages may have heard of it, and each words it in its own way
    return head + terminal.body[:MAX_BODY_BYTES]


def stage_of(timings: Timings) -> str:
    """Return how far a request had come when it ended."""
    if timings.first_token_s is not None:
        return "decoding"
    if timings.prefill_s is not None or timings.prefill_queue_s is not None:
        return "pulling, or between the legs"
    if timings.prefill_mode is not None:
        return f"{timings.prefill_mode} prefill, or its queue"
    if timings.decode_queue_s is not None:
        return "taken by decode"
    if timings.render_s is not None:
        return "waiting for decode"
    return "waiting for render"
