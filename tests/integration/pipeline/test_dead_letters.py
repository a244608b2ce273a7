"""Dead letters: what cannot be worked off is kept, its caller is told, and an operator has it tried again."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.cli.dlq import letters as dead_letters
from headrace.cli.dlq import replay as dlq_replay
from headrace.cli.dlq import run as dlq
from headrace.cli.dlq.letters import Letter
from headrace.cli.dlq.replay import NotReplayedError
from headrace.cli.main import build_parser
from headrace.client import Client
from headrace.decode.handler import DecodeHandler
from headrace.render.handler import RenderHandler
from headrace.shared import subjects, wire
from headrace.shared import worker as worker_module
from headrace.shared.broker import Broker
from headrace.shared.errors import QueueFullError
from headrace.shared.messages import DeadLetter, Terminal
from headrace.shared.subjects import Lane, Role

from .conftest import STAGES, Pipeline
from .test_faults import completion, pool_of
from .test_flow import expected_text
from .test_lanes import job_of, publish_job

SECRET = "what nobody else may read"


class Poison:
    """Lets a handler fail, until it is cured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def put_into(self, handler: type, method: str) -> None:
        async def fail(*args: Any, **more: Any) -> None:
            raise RuntimeError("poison")

        self._monkeypatch.setattr(worker_module, "REDELIVERY_DELAY_S", 0.01)
        self._monkeypatch.setattr(handler, method, fail)

    def cure(self) -> None:
        self._monkeypatch.undo()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    return Poison(monkeypatch)


@pytest.fixture
async def client(pipeline: Pipeline) -> AsyncIterator[Client]:
    async with Client(pipeline.settings.broker, tenant="acme") as client:
        yield client


async def letters_of(pipeline: Pipeline, stage: Role = Role.DECODE) -> list[Letter]:
    """Return this test's own letters: the server is shared."""
    model = pipeline.settings.model.served_name
    return [
        letter
        async for letter in dead_letters.letters(pipeline.broker, stage)
        if model in (await kept_subject(pipeline, letter.id))
    ]


async def kept_subject(pipeline: Pipeline, number: int) -> str:
    kept = await pipeline.broker.admin.message(dead_letters.STREAM, number)
    assert kept is not None
    return kept.received.subject


async def run(pipeline: Pipeline, *arguments: str) -> int:
    options = build_parser().parse_args(["dlq", *arguments])
    return await dlq.act(options, pipeline.settings.broker)


async def put_aside(pipeline: Pipeline, client: Client, lane: Any = "std") -> tuple[str, Letter]:
    """Submit what the poisoned stage gives up on; return its ID and its letter."""
    body = completion(pipeline, SECRET)
    request_id = await client.submit(body, lane=lane, endpoint="completions")
    result = await client.result(request_id)
    assert (result.status, result.http_status) == ("error", 500)
    while not (found := await letters_of(pipeline)):  # the caller is told first
        pass
    return request_id, found[0]


@pytest.mark.parametrize("lane", ["std", "bulk", "rt"])
async def test_a_poisoned_job_is_kept_with_its_reason_and_runs_when_it_is_replayed(
    pipeline: Pipeline, client: Client, poison: Poison, lane: str
) -> None:
    await pipeline.start(*STAGES)
    poison.put_into(DecodeHandler, "generate")
    request_id, letter = await put_aside(pipeline, client, lane)
    assert letter.content is not None
    assert (letter.stage, letter.reason, letter.content.num_delivered) == (
        "decode",
        "RuntimeError: poison",
        5,
    )
    assert letter.content.subject == subjects.job(pool_of(pipeline), "acme", Lane(lane))
    assert letter.request is not None
    assert letter.request.request_id == request_id
    poison.cure()
    assert await run(pipeline, "replay", str(letter.id), "--yes") == 0
    await client.result(request_id)
    result = await client.result(request_id)  # as whoever comes later reads it
    assert result.status == "ok"
    assert json.loads(result.body)["choices"][0]["text"] == expected_text(SECRET, 16)
    assert await letters_of(pipeline) == []
    stored = await pipeline.broker.last(subjects.res("acme", request_id))
    if lane == "rt":
        assert stored is None
    else:
        assert stored is not None
        assert wire.decode(stored.payload, Terminal).status == "ok"


async def test_a_poisoned_submission_without_headers_keeps_its_request_id_when_it_is_replayed(
    pipeline: Pipeline, client: Client, poison: Poison
) -> None:
    await pipeline.start(*STAGES)
    poison.put_into(RenderHandler, "handle")
    model = pipeline.settings.model.served_name
    request_id = f"r-{model}"
    await pipeline.broker.publish_durable(
        subjects.req("acme", model, Lane.STD),
        json.dumps(
            {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        ).encode(),
        message_id=request_id,
    )
    assert (await client.result(request_id)).status == "error"
    while not (found := await letters_of(pipeline, Role.RENDER)):
        pass
    (letter,) = found
    poison.cure()
    assert await run(pipeline, "replay", str(letter.id), "--yes") == 0
    assert (await client.result(request_id)).status == "ok"


async def test_a_request_that_has_a_good_end_is_not_replayed(
    pipeline: Pipeline, client: Client, poison: Poison
) -> None:
    await pipeline.start(*STAGES)
    poison.put_into(DecodeHandler, "generate")
    request_id, letter = await put_aside(pipeline, client)
    poison.cure()
    subject = subjects.res("acme", request_id)
    kept = await pipeline.broker.last(subject)
    assert kept is not None
    await pipeline.broker.admin.delete("HR_RES", int(kept.headers["Nats-Sequence"]))
    good = Terminal(request_id=request_id, seq=0, status="ok", http_status=200, body=b'"good"')
    await pipeline.broker.publish_durable(subject, wire.encode(good), message_id=request_id)
    with pytest.raises(NotReplayedError, match=r"has its end \(ok\)"):
        await dlq_replay.replay(pipeline.broker, pipeline.table, letter)
    last = await pipeline.broker.last(subject)
    assert last is not None
    assert wire.decode(last.payload, Terminal) == good
    assert await letters_of(pipeline) == [letter]


async def test_a_replay_that_is_not_accepted_leaves_the_letter_and_the_end_that_the_caller_was_told(
    pipeline: Pipeline, client: Client, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.start(*STAGES)
    poison.put_into(DecodeHandler, "generate")
    request_id, letter = await put_aside(pipeline, client)
    poison.cure()
    publish = Broker.publish_durable

    async def full(self: Broker, subject: str, *args: Any, **more: Any) -> bool:
        if subject.startswith("hr.v1.job."):
            raise QueueFullError("the queue is full")
        return await publish(self, subject, *args, **more)

    monkeypatch.setattr(Broker, "publish_durable", full)
    assert await run(pipeline, "replay", str(letter.id), "--yes") == 1
    kept = await pipeline.broker.last(subjects.res("acme", request_id))
    assert kept is not None
    assert wire.decode(kept.payload, Terminal).status == "error"
    assert await letters_of(pipeline) == [letter]


async def test_a_forged_job_takes_no_end_of_another_tenant_away(
    pipeline: Pipeline, client: Client, poison: Poison
) -> None:
    await pipeline.start(*STAGES)
    poison.put_into(DecodeHandler, "generate")
    victim, letter = await put_aside(pipeline, client)
    await publish_job(pipeline, job_of(pipeline, victim, lane=Lane.STD), tenant="evil")
    while len(found := await letters_of(pipeline)) < 2:  # it reads the broker: others go on
        pass
    forged = next(other for other in found if other.id != letter.id)
    with pytest.raises(NotReplayedError, match="not of its subject"):
        await dlq_replay.replay(pipeline.broker, pipeline.table, forged)
    assert await pipeline.broker.last(subjects.res("acme", victim)) is not None


async def test_a_job_whose_contract_is_gone_is_made_anew_by_render(
    pipeline: Pipeline, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pipeline.start(*STAGES)
    monkeypatch.setattr(dlq_replay, "WORKER_TIMEOUT_S", 0.1)
    model = pipeline.settings.model.served_name
    for age_s in (60, 300):
        request_id = f"r-{model}-{age_s}"
        job = job_of(
            pipeline, request_id, lane=Lane.STD, contract="gone", published=time.time() - age_s
        )
        lost = DeadLetter(
            stage=Role.DECODE,
            reason="RuntimeError: poison",
            subject=subjects.job(subjects.pool(model, "gone"), "acme", Lane.STD),
            headers={},
            payload=wire.encode(job),
            num_delivered=5,
        )
        await pipeline.broker.publish_durable(
            subjects.dead_letter(Role.DECODE, model), wire.encode(lost), message_id=request_id
        )
    young, old = await letters_of(pipeline)
    with pytest.raises(NotReplayedError, match="no ready decode worker"):
        await dlq_replay.replay(pipeline.broker, pipeline.table, old)
    with pytest.raises(NotReplayedError, match="not 120 s old"):  # its job's message ID is known
        await dlq_replay.replay(pipeline.broker, pipeline.table, young, anew=True)
    assert await run(pipeline, "replay", str(old.id), "--anew", "--yes") == 0
    result = await client.result(f"r-{model}-300")
    assert result.status == "ok"
    assert await letters_of(pipeline) == [young]


async def test_list_and_show_say_what_was_put_aside_and_not_what_its_caller_wrote(
    pipeline: Pipeline,
    client: Client,
    poison: Poison,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await pipeline.start(*STAGES)
    poison.put_into(DecodeHandler, "generate")
    request_id, letter = await put_aside(pipeline, client)
    assert await run(pipeline, "list", "--stage", "decode") == 0
    text = capsys.readouterr().out
    assert request_id in text
    assert "RuntimeError: poison" in text
    assert await run(pipeline, "list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    (row,) = [row for row in rows if row["id"] == letter.id]
    assert (row["stage"], row["num_delivered"], row["request_id"]) == ("decode", 5, request_id)
    assert await run(pipeline, "show", str(letter.id)) == 0
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert json.loads(shown)["request"]["num_prompt_token_ids"] == [len(SECRET)]
    assert '"prompt_token_ids"' not in shown
    assert await run(pipeline, "show", str(letter.id), "--payload") == 0
    payload = json.loads(capsys.readouterr().out)["payload"]
    assert json.loads(payload["body"])["prompt"] == SECRET
    assert bytes(payload["prompt_token_ids"][0]).decode() == SECRET


async def test_a_prefill_task_is_not_replayed_and_can_be_dropped(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pipeline.settings.model.served_name
    letter = DeadLetter(
        stage=Role.PREFILL,
        reason="rubbish",
        subject=subjects.prefill(f"{model}_0", Lane.RT),
        headers={},
        payload=b"rubbish",
        num_delivered=1,
    )
    await pipeline.broker.publish_durable(
        subjects.dead_letter(Role.PREFILL, model), wire.encode(letter), message_id=model
    )
    (found,) = await letters_of(pipeline, Role.PREFILL)
    assert found.request is None
    assert await run(pipeline, "replay", str(found.id), "--yes") == 1
    assert "decode went on without it" in capsys.readouterr().err
    assert await run(pipeline, "drop", str(found.id), "--yes") == 0
    assert await letters_of(pipeline, Role.PREFILL) == []
    assert await run(pipeline, "drop", str(found.id), "--yes") == 1
