"""Derender: a step of one stream that takes long holds up neither the other streams nor its own order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headrace.derender import renderer as derenderers
from headrace.derender.renderer import AnswerStream, Closed, Derenderer, Fed
from headrace.derender.renderer_fake import FakeDerenderer
from headrace.shared import subjects, token_ids, wire
from headrace.shared.broker import Received
from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import (
    Chunk,
    Frame,
    Job,
    OpenStream,
    Prompt,
    StreamEnd,
    StreamOpened,
    Terminal,
    Tokens,
)
from headrace.shared.pulse import answering_pings
from headrace.shared.settings import EngineKind, Settings
from headrace.shared.subjects import Lane, Role

from .conftest import Pipeline

DECODE = "decode-test"
LONG = 50_000  #: token IDs


class Gate:
    """Holds one kind of call into the answer of one request, when it comes on a thread of its own."""

    def __init__(self) -> None:
        self.request_id = ""
        self.kind = ""
        self.came = asyncio.Event()
        self.was_on_loop = False
        self._go_on = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def hold(self, request_id: str, kind: str) -> None:
        self.request_id, self.kind = request_id, kind

    def release(self) -> None:
        self._go_on.set()

    def pass_through(self, request_id: str, kind: str) -> None:
        if (request_id, kind) != (self.request_id, self.kind):
            return
        self._loop.call_soon_threadsafe(self.came.set)
        if threading.get_ident() == self._loop_thread:
            self.was_on_loop = True  # waiting here would be for ever
            return
        self._go_on.wait()


class GatedAnswer:
    """The fake's answer behind a gate; two calls at once are an error."""

    def __init__(self, inner: AnswerStream, request_id: str, gate: Gate) -> None:
        self._inner = inner
        self._request_id = request_id
        self._gate = gate
        self._alone = threading.Lock()

    @property
    def is_finished(self) -> bool:
        return self._inner.is_finished

    def feed(self, choice: int, token_ids: list[int], **more: Any) -> Fed:
        if not self._alone.acquire(blocking=False):
            raise EngineRequestError("two calls into one answer at once")
        try:
            self._gate.pass_through(self._request_id, "feed")
            return self._inner.feed(choice, token_ids, **more)
        finally:
            self._alone.release()

    def close(self) -> Closed:
        if not self._alone.acquire(blocking=False):
            raise EngineRequestError("two calls into one answer at once")
        try:
            self._gate.pass_through(self._request_id, "close")
            return self._inner.close()
        finally:
            self._alone.release()


class GatedDerenderer(FakeDerenderer):
    """The fake derenderer with a gate in each answer."""

    def __init__(self, settings: Settings, gate: Gate) -> None:
        super().__init__(settings)
        self._gate = gate

    def open(self, job: Job) -> AnswerStream:
        self._gate.pass_through(job.request_id, "open")
        return GatedAnswer(super().open(job), job.request_id, self._gate)


class Derender:
    """One derender worker, as decode and the reader of the answers see it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._worker = pipeline.heartbeat(Role.DERENDER)
        self._answers: dict[str, asyncio.Queue[Chunk | Terminal]] = {}
        self._seq = 0

    async def open(
        self, stream_id: int, *, num_prompt_ids: int = 1, stream: bool = True
    ) -> StreamOpened:
        prompt = Prompt(
            token_ids=token_ids.pack([97] * num_prompt_ids),
            sampling_params=msgspec.msgpack.encode({}),
        )
        request_id = self.request_id(stream_id)
        answers = self._answers[request_id] = asyncio.Queue()

        def on_answer(received: Received) -> None:
            answers.put_nowait(wire.decode(received.payload, Chunk, Terminal))

        await self._pipeline.broker.subscribe(subjects.out("t", request_id), on_answer)
        job = Job(
            request_id=request_id,
            tenant="t",
            model=self._worker.model,
            lane=Lane.RT,
            endpoint="completions",
            created=7,
            published=0.0,
            deadline=2**40,
            contract=self._worker.contract,
            body=b"{}",
            stream=stream,
            prompts=(prompt,),
        )
        claim = OpenStream(stream_id=stream_id, attempt=1, decode_instance=DECODE, job=job)
        answer = await self._pipeline.broker.request(
            subjects.derender_open(self._worker.model), wire.encode(claim), timeout_s=60
        )
        return wire.decode(answer, StreamOpened)

    def request_id(self, stream_id: int) -> str:
        return f"{self._worker.instance}-{stream_id}"

    async def send(self, *tokens: Tokens, ends: tuple[StreamEnd, ...] = ()) -> None:
        self._seq += 1
        frame = Frame(decode_instance=DECODE, seq=self._seq, tokens=tokens, ends=ends)
        await self._pipeline.broker.publish(
            subjects.frames(self._worker.instance), wire.encode(frame)
        )

    async def next(self, stream_id: int) -> Chunk | Terminal:
        return await self._answers[self.request_id(stream_id)].get()

    async def text(self, stream_id: int) -> str:
        chunk = await self.next(stream_id)
        assert isinstance(chunk, Chunk)
        parts = [msgspec.json.decode(one) for one in chunk.chunks]
        return "".join(choice["text"] for part in parts for choice in part["choices"])

    def has_answered(self, stream_id: int) -> bool:
        return not self._answers[self.request_id(stream_id)].empty()


def tokens(stream_id: int, index: int, text: str, **more: Any) -> Tokens:
    packed = token_ids.pack(list(text.encode()))
    return Tokens(stream_id=stream_id, index=index, choice=0, token_ids=packed, **more)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.release()


@pytest.fixture
async def derender(
    pipeline: Pipeline, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Derender]:
    def build(settings: Settings, engine: EngineKind) -> Derenderer:
        return GatedDerenderer(settings, gate)

    monkeypatch.setattr(derenderers, "build", build)
    await pipeline.start(Role.DERENDER)
    async with answering_pings(pipeline.broker, DECODE):
        yield Derender(pipeline)
    gate.release()


async def test_a_long_feed_of_one_stream_does_not_delay_another(
    derender: Derender, gate: Gate
) -> None:
    await derender.open(1)
    await derender.open(2)
    gate.hold(derender.request_id(1), "feed")
    await derender.send(tokens(1, 0, "a" * LONG), tokens(2, 0, "b"))
    await gate.came.wait()
    assert await derender.text(2) == "b"
    assert not gate.was_on_loop
    assert not derender.has_answered(1)


async def test_what_comes_behind_a_long_feed_keeps_its_place(
    derender: Derender, gate: Gate
) -> None:
    await derender.open(1)
    await derender.open(2)
    gate.hold(derender.request_id(1), "feed")
    await derender.send(tokens(1, 0, "a" * LONG))
    await gate.came.wait()
    end = StreamEnd(stream_id=1, num_entries=3)
    await derender.send(tokens(1, 1, "b"))
    await derender.send(tokens(1, 2, "c", finish_reason="length"), tokens(2, 0, "d"), ends=(end,))
    assert await derender.text(2) == "d"
    assert not derender.has_answered(1)
    gate.release()
    assert [await derender.text(1) for _ in range(3)] == ["a" * LONG, "b", "c"]
    terminal = await derender.next(1)
    assert isinstance(terminal, Terminal)
    assert (terminal.status, terminal.seq) == ("ok", 3)


async def test_many_entries_of_one_stream_do_not_delay_another(
    derender: Derender, gate: Gate
) -> None:
    await derender.open(1)
    await derender.open(2)
    gate.hold(derender.request_id(1), "feed")
    replayed = [tokens(1, index, "a") for index in range(2_000)]
    await derender.send(*replayed, tokens(2, 0, "b"))
    await gate.came.wait()
    assert await derender.text(2) == "b"
    assert not gate.was_on_loop
    gate.release()
    chunks = [await derender.next(1) for _ in range(2_000)]
    assert [chunk.seq for chunk in chunks] == list(range(2_000))


async def test_opening_a_long_prompt_does_not_delay_another_stream(
    derender: Derender, gate: Gate
) -> None:
    await derender.open(2)
    gate.hold(derender.request_id(1), "open")
    opening = asyncio.create_task(derender.open(1, num_prompt_ids=LONG))
    await gate.came.wait()
    await derender.send(tokens(2, 0, "b"))
    assert await derender.text(2) == "b"
    assert not gate.was_on_loop
    gate.release()
    await opening
    await derender.send(tokens(1, 0, "a"))
    assert await derender.text(1) == "a"


async def test_closing_a_long_whole_answer_does_not_delay_another_stream(
    derender: Derender, gate: Gate
) -> None:
    await derender.open(1, stream=False)
    await derender.open(2)
    gate.hold(derender.request_id(1), "close")
    end = StreamEnd(stream_id=1, num_entries=1)
    await derender.send(tokens(1, 0, "a" * LONG, finish_reason="length"), ends=(end,))
    await gate.came.wait()
    await derender.send(tokens(2, 0, "b"))
    assert await derender.text(2) == "b"
    assert not gate.was_on_loop
    gate.release()
    terminal = await derender.next(1)
    assert isinstance(terminal, Terminal)
    assert terminal.status == "ok"
