"""Stands between one process and the broker: loses, repeats and holds up single NATS messages.

It reads the protocol's framing and nothing else. With no rule in force it hands on what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Action = Literal["drop", "repeat", "delay"]
READ_BYTES = 256 * 1024
_CARRIERS = (b"MSG", b"HMSG", b"PUB", b"HPUB")


@dataclass(frozen=True, slots=True)
class Message:
    """One protocol message, whole. `subject` is empty where it carries no payload."""

    subject: str
    raw: bytes


class Splitter:
    """Cuts a NATS byte stream, of either direction, into its messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete by now."""
        self._buffer += data
        start = 0
        while (end := self._buffer.find(b"\r\n", start)) >= 0:
            words = bytes(self._buffer[start:end]).split()
            stop, subject = end + 2, ""
            if words and words[0].upper() in _CARRIERS:
                stop += int(words[-1]) + 2
                subject = words[1].decode()
                if stop > len(self._buffer):
                    break
            yield Message(subject, bytes(self._buffer[start:stop]))
            start = stop
        del self._buffer[:start]


@dataclass(slots=True)
class Rule:
    """What happens to the next messages whose subject begins so, in both directions."""

    action: Action
    prefix: str
    count: int  #: messages left
    share: float  #: of the messages that match
    delay_s: float
    until: float  #: monotonic seconds
    only_in: bool = False  #: only on their way from the broker
    num_hit: int = 0


class Proxy:
    """Listens on a port of its own and connects each client to the broker."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._server: asyncio.Server | None = None
        self._port = 0
        self._pipes: set[asyncio.Task[None]] = set()
        self._rules: list[Rule] = []
        self._rng = random.Random(0)
        self._is_cut = False

    @property
    def url(self) -> str:
        """Where clients reach the broker through it."""
        return f"nats://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut everything, for good."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def add(self, rule: Rule, seed: int) -> None:
        """Put a rule in force; `seed` decides which messages it hits."""
        self._rng = random.Random(seed)
        self._rules.append(rule)

    def let_in(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def cut(self) -> None:
        """Break every connection and let nobody in, until `let_in`."""
        self._is_cut = True
        for pipe in self._pipes:
            pipe.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._is_cut:
                return
            from_broker, upstream = await asyncio.open_connection("127.0.0.1", self._broker_port)
            ways = {
                asyncio.create_task(self._pipe(reader, upstream, is_in=False)),
                asyncio.create_task(self._pipe(from_broker, writer, is_in=True)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the broker is away, or this connection was cut: the client sees it closed
        finally:
            self._pipes.discard(task)
            for end in (writer, upstream):
                if end is not None:
                    end.transport.abort()

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_in: bool
    ) -> None:
        splitter = Splitter()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                messages = list(splitter.feed(data))
                for message in messages:
                    for raw in self._treated(message, writer, is_in):
                        writer.write(raw)
                await writer.drain()

    def _treated(
        self, message: Message, writer: asyncio.StreamWriter, is_in: bool
    ) -> Iterator[bytes]:
        rule = self._rule_for(message.subject, is_in)
        if rule is None:
            yield message.raw
            return
        rule.num_hit += 1
        rule.count -= 1
        if rule.action == "repeat":
            yield message.raw
            yield message.raw
        elif rule.action == "delay":
            loop = asyncio.get_running_loop()
            loop.call_later(rule.delay_s * self._rng.random(), _write, writer, message.raw)

    def _rule_for(self, subject: str, is_in: bool) -> Rule | None:
        if not self._rules or not subject:
            return None
        now = time.monotonic()
        self._rules = [rule for rule in self._rules if rule.count > 0 and now < rule.until]
        for rule in self._rules:
            if rule.only_in and not is_in:
                continue
            if subject.startswith(rule.prefix) and self._rng.random() < rule.share:
                return rule
        return None


def _write(writer: asyncio.StreamWriter, raw: bytes) -> None:
    if not writer.is_closing():
        writer.write(raw)
