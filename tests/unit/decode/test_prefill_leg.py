"""What decode asks a prefill worker for: all that its answer depends on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from headrace.decode.prefill_leg import PrefillLeg
from headrace.decode.priority import engine_priority
from headrace.engine.fake_text import expected_prompt_logprobs
from headrace.engine.interface import EngineInfo
from headrace.shared import token_ids, wire
from headrace.shared.broker import Received
from headrace.shared.messages import Handoff, Job, PrefillTask, Prompt
from headrace.shared.subjects import Lane

INFO = EngineInfo(
    engine_id="d",
    block_size=16,
    num_blocks=8,
    max_model_len=512,
    vocab_size=257,
    block_bytes=1,
    lease_s=30.0,
)
IDS = [5, 6, 7]
PROMPT = Prompt(
    token_ids=token_ids.pack(IDS), sampling_params=b"", cache_salt="salt", prompt_logprobs=2
)
JOB = Job(
    request_id="r",
    tenant="acme",
    model="m",
    lane=Lane.RT,
    endpoint="completions",
    created=1,
    published=1.0,
    deadline=9.0,
    contract="c",
    body=b"{}",
    stream=False,
    prompts=(PROMPT,),
    priority=7,
)


class Broker:
    """Hands each task to a prefill worker that answers at once."""

    def __init__(self) -> None:
        self.tasks: list[PrefillTask] = []
        self._on_answer: Callable[[Received], None] | None = None

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        pass

    async def subscribe(self, subject: str, callback: Callable[[Received], None]) -> None:
        self._on_answer = callback

    async def publish_durable(self, subject: str, payload: bytes, *, message_id: str) -> None:
        task = wire.decode(payload, PrefillTask)
        self.tasks.append(task)
        assert self._on_answer is not None
        self._on_answer(Received("kv", wire.encode(handoff_of(task)), {}, ""))


def handoff_of(task: PrefillTask) -> Handoff:
    return Handoff(
        task_id=task.task_id,
        request_id=task.request_id,
        prefill_instance="prefill-1",
        epoch="e",
        contract=task.contract,
        prompt_hash=task.prompt_hash,
        expires=30.0,
        kv_transfer_params={
            "do_remote_prefill": True,
            "remote_block_ids": [[1]],
            "remote_engine_id": "e",
            "remote_request_id": "t-1",
            "remote_host": "127.0.0.1",
            "remote_port": 4711,
            "tp_size": 1,
            "remote_num_tokens": 3,
        },
        prefill_queue_s=0.0,
        prefill_s=0.0,
        prompt_logprobs=expected_prompt_logprobs(
            token_ids.unpack(task.token_ids), task.prompt_logprobs
        ),
    )


async def test_salt_priority_and_logprobs_of_the_job_stand_in_the_task() -> None:
    broker = Broker()
    table = SimpleNamespace(workers=list)
    worker: Any = SimpleNamespace(
        broker=broker, instance="decode-1", contract="c", pool="m.c", table=table
    )
    engine: Any = None  # nothing is given back
    leg = PrefillLeg(worker, engine, INFO, timeout_s=5.0, margin_s=1.0, now=lambda: 2.0)
    await leg.start()
    handoff = await leg.compute(JOB, PROMPT)
    (task,) = broker.tasks
    assert (task.priority, task.cache_salt, task.prompt_logprobs) == (
        engine_priority(JOB),
        "salt",
        2,
    )
    assert task.prompt_hash == token_ids.prompt_hash(PROMPT.token_ids, "salt")
    assert (task.tenant, task.request_id) == ("acme", "r")
    assert handoff.prompt_logprobs == expected_prompt_logprobs(IDS, 2)
