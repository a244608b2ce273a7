"""A gateway whose broker and pipeline are scripted, and a client that sees each part of an answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.gateway.app import create_app
from headrace.gateway.ask import Asker
from headrace.gateway.handler import Handler
from headrace.gateway.keyring import Keyring
from headrace.gateway.link import Link
from headrace.gateway.pace import Pace
from headrace.shared import subjects, wire
from headrace.shared.errors import BrokerError
from headrace.shared.messages import Ask, AskAnswer, Cancel, Chunk, Heartbeat, Terminal
from headrace.shared.subjects import Role
from headrace.shared.submission import Submission
from headrace.shared.wire import Message

NOW = 1_800_000_000.0
JSON_HEADERS = {"content-type": "application/json"}


@dataclass
class Received:
    subject: str
    payload: bytes
    headers: dict[str, str] = field(default_factory=dict)
    reply: str = ""


class Subscription:
    def __init__(self, broker: FakeBroker, subject: str) -> None:
        self._broker, self._subject = broker, subject

    async def drop(self) -> None:
        self._broker.handlers.pop(self._subject, None)
        self._broker.changed.set()


async def never(ask: Ask) -> AskAnswer:
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


class FakeBroker:
    """Keeps what is published; `script` is the pipeline's answer to a submission."""

    def __init__(self) -> None:
        self.is_connected = True
        self.handlers: dict[str, Callable[[Received], None]] = {}
        self.captured: dict[str, list[Received]] = {}
        self.submissions: list[Submission] = []
        self.cancels: list[Cancel] = []
        self.replays: list[str] = []
        self.refuse: Exception | None = None
        self.hang: asyncio.Event | None = (
            None  # a broker that is stopped takes nothing until it is set
        )
        self.is_new = True
        self.num_failing_replays = 0
        self.asks: list[tuple[str, Ask]] = []
        self.answer: Callable[[Ask], Awaitable[AskAnswer]] = never
        self.script: Callable[[Submission], None] = lambda submission: None
        self.changed = asyncio.Event()

    async def subscribe(
        self, subject: str, handler: Callable[[Received], None], *, is_confirmed: bool = True
    ) -> Subscription:
        self.handlers[subject] = handler
        return Subscription(self, subject)

    async def stored_on(self, pattern: str) -> list[Received]:
        return []

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        pass

    async def publish(self, subject: str, payload: bytes, headers: Any = None) -> None:
        if not self.is_connected:
            raise BrokerError("not connected")
        cancel = wire.decode(payload, Cancel)
        assert subject == subjects.cancel(cancel.tenant, cancel.request_id)
        self.cancels.append(cancel)
        self.changed.set()

    async def publish_durable(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str,
        headers: dict[str, str],
        kept_s: float | None,
    ) -> bool:
        if self.hang is not None:
            await self.hang.wait()
        if self.refuse is not None:
            raise self.refuse
        received = headers | {"Nats-Msg-Id": message_id}
        submission = Submission.from_received(subject, received, payload, NOW)
        self.submissions.append(submission)
        self.changed.set()
        self.script(submission)
        return self.is_new

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        ask = wire.decode(payload, Ask)
        self.asks.append((subject, ask))
        self.changed.set()
        return wire.encode(await self.answer(ask))

    async def replay(self, subject: str) -> list[Received]:
        self.replays.append(subject)
        self.changed.set()
        if self.num_failing_replays > 0:
            self.num_failing_replays -= 1
            raise BrokerError("no answer")
        return [
            dataclasses.replace(received, headers={"Nats-Sequence": f"{sequence}"})
            for sequence, received in enumerate(self.captured.get(subject, ()), 1)
        ]

    def send(self, submission: Submission, *messages: Message, lose: tuple[int, ...] = ()) -> None:
        """Publish answer messages; those at the positions in `lose` are captured but not delivered."""
        subject = subjects.out(submission.tenant, submission.request_id)
        for position, message in enumerate(messages):
            received = Received(subject, wire.encode(message))
            self.captured.setdefault(subject, []).append(received)
            if position not in lose and subject in self.handlers:
                self.handlers[subject](received)

    def refuse_to_store(self, submission: Submission, message: Message) -> None:
        """Deliver a message that its stream refuses: the broker does both."""
        subject = subjects.out(submission.tenant, submission.request_id)
        self.handlers[subject](Received(subject, wire.encode(message)))

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class FakeWorkers:
    def __init__(self, *beats: Heartbeat) -> None:
        self.beats = list(beats)

    def workers(self) -> list[Heartbeat]:
        return self.beats

    def models(self) -> dict[str, list[Heartbeat]]:
        models: dict[str, list[Heartbeat]] = {}
        for beat in self.beats:
            models.setdefault(beat.model, []).append(beat)
        return models


class Exchange:
    """One HTTP exchange at the ASGI seam: shows the answer part by part, and can hang up."""

    def __init__(
        self,
        app: Any,
        path: str,
        parts: list[bytes],
        headers: dict[str, str],
        *,
        is_complete: bool = True,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.writes: list[bytes] = []
        self.done = False
        self._parts = list(parts)
        self._sink: Callable[[dict[str, Any]], Any] | None = None
        self._is_complete = is_complete
        self._gone = asyncio.Event()
        self._changed = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task.add_done_callback(lambda _: self._changed.set())

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {
                "type": "http.request",
                "body": part,
                "more_body": bool(self._parts) or not self._is_complete,
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def send_to(self, send: Callable[[dict[str, Any]], Any]) -> None:
        """Let `send` take what is sent from here on."""
        self._sink = send

    async def _send(self, message: dict[str, Any]) -> None:
        if self._sink is not None:
            await self._sink(message)
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            if message["body"]:
                self.writes.append(message["body"])
            self.body += message["body"]
            self.done = not message.get("more_body", False)
        self._changed.set()

    def hang_up(self) -> None:
        self._gone.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert not self.task.done(), f"ended with {self.status} {self.body!r}"
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> Exchange:
        await self.task
        return self

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    @property
    def events(self) -> list[str]:
        assert self.body.endswith(b"\n\n")
        return [event.removeprefix("data: ") for event in self.body.decode().split("\n\n")[:-1]]


class GatewayUnderTest:
    def __init__(self, pace: Pace, keyring: Keyring) -> None:
        self.broker = FakeBroker()
        self.workers = FakeWorkers(beat(Role.RENDER), beat(Role.DECODE), beat(Role.DERENDER))
        self.link = Link()
        self.link.open(self.broker, self.workers)
        self.pace = pace
        self.handler = Handler(
            self.link, instance="gateway-1", deadline_s=600.0, pace=pace, clock=lambda: NOW
        )
        asker = Asker(self.link, timeout_s=pace.ask_timeout_s, clock=lambda: NOW)
        self.app = create_app(
            self.link,
            self.handler,
            asker,
            keyring=keyring,
            tenant="default",
            max_body_bytes=1_000,
            pace=pace,
        )

    def post(
        self,
        body: Any = None,
        *,
        path: str = "/v1/chat/completions",
        parts: list[bytes] | None = None,
        headers: dict[str, str] | None = None,
        is_complete: bool = True,
        **fields: Any,
    ) -> Exchange:
        if parts is None:
            content = {"model": "m", "messages": [], **fields} if body is None else body
            parts = [content if isinstance(content, bytes) else json.dumps(content).encode()]
        sent = JSON_HEADERS | (headers or {})
        return Exchange(self.app, path, parts, sent, is_complete=is_complete)


def beat(role: Role, model: str = "m", **fields: Any) -> Heartbeat:
    values = {"contract": "c", "state": "ready", "slots": 1, "num_running": 0} | fields
    return Heartbeat(role=role, instance=f"{role}-1", model=model, **values)


def chunk(submission: Submission, seq: int, *texts: str) -> Chunk:
    chunks = tuple(f'{{"text":"{text}"}}'.encode() for text in texts or (f"t{seq}",))
    return Chunk(request_id=submission.request_id, seq=seq, chunks=chunks)


def terminal(submission: Submission, seq: int = 0, **fields: Any) -> Terminal:
    values = {"status": "ok", "http_status": 200} | fields
    return Terminal(request_id=submission.request_id, seq=seq, **values)


@pytest.fixture(name="pace")
def _pace() -> Pace:
    # Silence is endless but where a test is about it: nothing here may depend on how fast the machine is.
    return Pace(silence_s=1e6, max_silence_s=1e6, grace_s=1e6, cancel_interval_s=1e6)


@pytest.fixture(name="keyring")
def _keyring() -> Keyring:
    return Keyring({}, None)


@pytest.fixture
async def gateway(pace: Pace, keyring: Keyring) -> AsyncIterator[GatewayUnderTest]:
    gateway = GatewayUnderTest(pace, keyring)
    yield gateway
    await gateway.handler.aclose()


@pytest.fixture
def make() -> Any:
    """The messages that scripts are written in."""
    return SimpleNamespace(chunk=chunk, terminal=terminal, beat=beat)
