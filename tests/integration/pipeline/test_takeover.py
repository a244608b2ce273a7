"""A decode worker that is killed: its streams go on at another one, and the client sees each character once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from headrace.decode import frames
from headrace.derender.service import DerenderService
from headrace.engine.fake_text import expected_output
from headrace.shared import subjects, wire, workers
from headrace.shared.broker import Broker, Received, WorkQueue
from headrace.shared.messages import Chunk, StreamGone, Takeover, Terminal
from headrace.shared.subjects import Lane, Role
from headrace.shared.worker import Worker

from .conftest import Engines, Pipeline, Service, shorten_ack_wait
from .test_faults import completion, pool_of, slow, sse, text_of
from .test_flow import expected_text

NUM_IDS = 800
LONG = {"max_tokens": NUM_IDS, "ignore_eos": True}


class Brokers:
    """The broker of each service, in the order of their start."""

    def __init__(self) -> None:
        self.of_role: dict[Role, list[Broker]] = {role: [] for role in Role}

    async def crash(self, service: Service, number: int = -1) -> None:
        """End a service as kill -9 does: its connections close, and nothing more is said."""
        broker = self.of_role[service.role][number]
        broker._connections.shut()
        for connection in (broker._data, broker._control):
            await connection._nc.close()
        await service.kill()


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    found, connect = Brokers(), Broker.connect.__func__  # type: ignore[attr-defined]

    async def noted(cls: type[Broker], settings: Any, *, role: Any, name: str) -> Broker:
        broker: Broker = await connect(cls, settings, role=role, name=name)
        if role in set(Role):
            found.of_role[role].append(broker)
        return broker

    monkeypatch.setattr(Broker, "connect", classmethod(noted))
    return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker gives a job whose worker is silent to another one soon."""
    shorten_ack_wait(monkeypatch, 1.0)


class Answer:
    """A streamed answer, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.events: list[dict[str, Any]] = []

    def add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if "choices" in event:
            self.text += text_of(event)

    @property
    def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = self.events[-1]["usage"]
        return found

    @property
    def logprob_tokens(self) -> str:
        choices = [choice for event in self.events for choice in event["choices"]]
        return "".join("".join(choice["logprobs"]["tokens"]) for choice in choices)

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


async def streamed(
    client: httpx.AsyncClient, pipeline: Pipeline, prompt: str, *interruptions: Any, **more: Any
) -> Answer:
    """Return a streamed answer, behind whose first events the interruptions happen, one after another."""
    request = completion(pipeline, prompt, stream=True, **more)
    found, waiting = Answer(), list(interruptions)
    async with client.stream("POST", "/v1/completions", json=request) as response:
        async for event in sse(response.aiter_lines()):
            found.add(event)
            if waiting:
                await waiting.pop(0)()
    return found


class Takeovers:
    """What was said when a job got a new owner."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[Takeover] = asyncio.Queue()

    async def listen(self, pipeline: Pipeline) -> None:
        def on_message(received: Received) -> None:
            message = wire.decode(received.payload, Chunk, Terminal, Takeover)
            if isinstance(message, Takeover):
                self.seen.put_nowait(message)

        await pipeline.broker.subscribe("hr.v1.out.default.*", on_message)

    def last(self) -> Takeover:
        """Return the one that was stored: of several the last, for the broker delivers refused ones, too."""
        while True:
            takeover = self.seen.get_nowait()
            if self.seen.empty():
                return takeover


@pytest.fixture
async def takeovers(pipeline: Pipeline) -> Takeovers:
    found = Takeovers()
    await found.listen(pipeline)
    return found


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 2}, {"temperature": 0.0, "seed": 7}, {"stop": ["Z", " never there"]}],
    ids=["plain", "logprobs", "a seed that no one heeds", "stop strings held back"],
)
async def test_a_stream_goes_on_where_its_killed_owner_ended(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    brokers: Brokers,
    takeovers: Takeovers,
    more: dict[str, Any],
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)

    async def replace() -> None:
        await pipeline.start(Role.DECODE)
        await brokers.crash(first, 0)

    usage = {"stream_options": {"include_usage": True}}
    answer = await streamed(client, pipeline, "goes on", replace, **LONG, **usage, **more)
    seed = {"seed": more["seed"]} if "seed" in more else {}
    assert answer.text == expected_text("goes on", NUM_IDS, ignore_eos=True, **seed)
    assert answer.usage["completion_tokens"] == NUM_IDS
    assert answer.finish_reasons == ["length"]
    if "logprobs" in more:
        assert answer.logprob_tokens == answer.text
    takeover = takeovers.last()
    assert takeover.epoch == 2
    assert takeover.seq > 0


async def test_a_stop_string_that_was_half_out_ends_the_answer_at_the_next_owner(
    pipeline: Pipeline, client: httpx.AsyncClient, brokers: Brokers, engines: Engines
) -> None:
    whole = expected_text("half out", NUM_IDS, ignore_eos=True)
    stop = whole[500:540]
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)
    engine = engines.decode[0]

    async def replace() -> None:
        await pipeline.start(Role.DECODE)
        steps = engine.stats().num_steps
        # 39 characters are held back at any time; so some of the stop string are fed and not sent
        await engine.wait_until(lambda stats: stats.num_steps > max(steps, 520))
        await brokers.crash(first, 0)

    answer = await streamed(client, pipeline, "half out", replace, stop=stop, **LONG)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reasons == ["stop"]


async def test_an_answer_of_which_nothing_was_seen_starts_anew(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    brokers: Brokers,
    held: Engines,
    takeovers: Takeovers,
) -> None:
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)
    asking = asyncio.create_task(streamed(client, pipeline, "anew"))
    await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
    held.hold_decode = False
    await pipeline.start(Role.DECODE)
    await brokers.crash(first, 0)
    assert (await asking).text == expected_text("anew", 16)
    assert takeovers.last().seq == 0


async def test_the_second_owner_may_be_killed_too(
    pipeline: Pipeline, client: httpx.AsyncClient, brokers: Brokers, takeovers: Takeovers
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    owners = await pipeline.start(Role.DECODE)

    async def replace() -> None:
        owners.extend(await pipeline.start(Role.DECODE))
        await brokers.crash(owners[-2], len(owners) - 2)
        await takeovers.seen.get()

    answer = await streamed(client, pipeline, "three owners", replace, replace, **LONG)
    assert answer.text == expected_text("three owners", NUM_IDS, ignore_eos=True)


@pytest.mark.usefixtures("hasty")
async def test_decode_and_derender_may_be_killed_together(
    pipeline: Pipeline, client: httpx.AsyncClient, brokers: Brokers
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL)
    derender, decode = await pipeline.start(Role.DERENDER, Role.DECODE)

    async def replace() -> None:
        await asyncio.gather(brokers.crash(decode, 0), brokers.crash(derender, 0))
        await pipeline.start(Role.DERENDER, Role.DECODE)

    answer = await streamed(client, pipeline, "both", replace, **LONG)
    assert answer.text == expected_text("both", NUM_IDS, ignore_eos=True)


@pytest.mark.parametrize("more", [{"seed": 1}, {"n": 2}], ids=["seed", "choices"])
async def test_what_can_not_go_on_exactly_ends_with_one_error_event(
    pipeline: Pipeline, client: httpx.AsyncClient, brokers: Brokers, more: dict[str, Any]
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)

    async def replace() -> None:
        await pipeline.start(Role.DECODE)
        await brokers.crash(first, 0)

    answer = await streamed(client, pipeline, "cut off", replace, **LONG, **more)
    errors = [event for event in answer.events if "error" in event]
    assert errors == [answer.events[-1]]
    assert errors[0]["error"]["code"] == 500


async def test_an_answer_in_one_piece_starts_anew(
    pipeline: Pipeline, client: httpx.AsyncClient, brokers: Brokers, engines: Engines
) -> None:
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)
    request = completion(pipeline, "in one piece", **LONG)
    asking = asyncio.create_task(client.post("/v1/completions", json=request))
    await engines.decode[0].wait_until(lambda stats: stats.num_steps > 20)
    await pipeline.start(Role.DECODE)
    await brokers.crash(first, 0)
    text = (await asking).json()["choices"][0]["text"]
    assert text == expected_text("in one piece", NUM_IDS, ignore_eos=True)


async def test_an_owner_that_is_killed_before_the_terminal_is_published_leaves_one(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    brokers: Brokers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Derender has it all, and is about to publish the end: it does, and then gives the job back."""
    reached, go_on, handed_back = asyncio.Event(), asyncio.Event(), asyncio.Event()
    publish, hand_back = Worker.publish_terminal, Broker.hand_back

    async def gated(self: Worker, *args: Any, **more: Any) -> None:
        reached.set()
        await go_on.wait()
        await publish(self, *args, **more)

    async def noted(self: Broker, reply: str) -> None:
        await hand_back(self, reply)
        handed_back.set()

    lost = asyncio.Event()
    on_lost = DerenderService._on_lost

    def noting(self: DerenderService, decode: str) -> None:
        on_lost(self, decode)
        lost.set()

    monkeypatch.setattr(Worker, "publish_terminal", gated)
    monkeypatch.setattr(Broker, "hand_back", noted)
    monkeypatch.setattr(DerenderService, "_on_lost", noting)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)
    queue = WorkQueue.job(pool_of(pipeline), Lane.RT)
    request_id = f"r-{pipeline.settings.model.served_name}"
    messages: list[Any] = []
    await pipeline.broker.subscribe(
        subjects.out("default", request_id),
        lambda received: messages.append(wire.decode(received.payload, Chunk, Terminal, Takeover)),
    )
    request = completion(pipeline, "at the end", stream=True)
    headers = {"X-Request-Id": request_id}
    asking = asyncio.create_task(client.post("/v1/completions", json=request, headers=headers))
    await reached.wait()
    await brokers.crash(first, 0)
    await lost.wait()
    assert not handed_back.is_set()
    await pipeline.start(Role.DECODE)
    go_on.set()
    body = (await asking).text
    data = [json.loads(line[6:]) for line in body.split("\n\n") if line and "[DONE]" not in line]
    assert "".join(map(text_of, data)) == expected_text("at the end", 16)
    await handed_back.wait()
    await until_settled(pipeline, queue)
    assert [type(message) for message in messages].count(Terminal) == 1
    assert not any(isinstance(message, Takeover) for message in messages)


async def until_settled(pipeline: Pipeline, queue: WorkQueue) -> None:
    """Return once the queue holds nothing more, taken or not."""
    subject = f"$JS.API.CONSUMER.INFO.{queue.stream}.{queue.consumer}"
    while True:
        info = json.loads(await pipeline.broker.request(subject, b"", timeout_s=5))
        if info["num_pending"] == 0 and info["num_ack_pending"] == 0:
            return


async def test_a_killed_derender_worker_is_noticed_without_waiting_for_its_silence(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    brokers: Brokers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "STALL_S", float("inf"))
    monkeypatch.setattr(workers, "MISSED_BEATS", float("inf"))
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DECODE)
    (first,) = await pipeline.start(Role.DERENDER)

    async def replace() -> None:
        await pipeline.start(Role.DERENDER)
        await brokers.crash(first, 0)

    answer = await streamed(client, pipeline, "derender", replace, **LONG)
    assert answer.text == expected_text("derender", NUM_IDS, ignore_eos=True)


@pytest.fixture
def silenced(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Decode workers whose frames get lost."""
    found: set[str] = set()
    publish = Broker.publish

    async def lossy(self: Broker, subject: str, payload: bytes, headers: Any = None) -> None:
        if subject.removeprefix("hr.v1.frames.") not in found:
            await publish(self, subject, payload, headers)

    monkeypatch.setattr(Broker, "publish", lossy)
    return found


async def test_a_stream_that_moved_away_frees_its_slot_at_the_derender_worker_it_left(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    silenced: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a pause of that worker, or a broken connection: decode has given it up, and it has not heard."""
    monkeypatch.setattr(frames, "STALL_S", 0.5)
    slow(pipeline)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DECODE)
    await pipeline.start(Role.DERENDER)
    first = pipeline.heartbeat(Role.DERENDER).instance
    gone: asyncio.Queue[StreamGone] = asyncio.Queue()

    def on_frame(received: Received) -> None:
        if b"stream_gone.v1" in received.payload:
            gone.put_nowait(wire.decode(received.payload, StreamGone))

    await pipeline.broker.subscribe(subjects.frames(first), on_frame)

    async def replace() -> None:
        await pipeline.start(Role.DERENDER)
        silenced.add(first)

    answer = await streamed(client, pipeline, "moved", replace, **LONG)
    assert answer.text == expected_text("moved", NUM_IDS, ignore_eos=True)
    silenced.clear()
    await gone.get()
    await pipeline.table.wait_for(
        lambda table: all(beat.num_running == 0 for beat in table.ready(Role.DERENDER))
    )


async def test_the_ids_of_all_owners_are_counted(
    pipeline: Pipeline, client: httpx.AsyncClient, brokers: Brokers
) -> None:
    """In the usage and in the timings, behind an answer that ends by itself."""
    slow(pipeline)
    ids = expected_output(list(b"counted"), NUM_IDS, min_tokens=600)
    await pipeline.start(Role.GATEWAY, Role.RENDER, Role.PREFILL, Role.DERENDER)
    (first,) = await pipeline.start(Role.DECODE)

    async def replace() -> None:
        await pipeline.start(Role.DECODE)
        await brokers.crash(first, 0)

    usage = {"stream_options": {"include_usage": True}}
    answer = await streamed(
        client, pipeline, "counted", replace, max_tokens=NUM_IDS, min_tokens=600, **usage
    )
    assert answer.usage["completion_tokens"] == len(ids)
    assert answer.finish_reasons == ["stop"]
