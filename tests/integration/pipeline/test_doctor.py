"""`headrace doctor` on a stack that works, and on one with planted faults."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest

from headrace.cli.doctor import run as doctor
from headrace.cli.main import build_parser
from headrace.engine.fake_engine import FakeDecodeEngine
from headrace.shared import settings as settings_module
from headrace.shared import subjects, wire
from headrace.shared.errors import EngineRequestError
from headrace.shared.messages import Heartbeat
from headrace.shared.settings import Settings
from headrace.shared.subjects import Role

from .conftest import STAGES, Engines, Pipeline


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Contexts that are short, so that the probes are."""
    fake = msgspec.structs.replace(settings.fake, max_model_len=1_100, prefill_s_per_1k=0.2)
    return msgspec.structs.replace(settings, fake=fake)


def of_model(report: doctor.Report, settings: Settings) -> dict[str, Any]:
    found = report.models[settings.model.served_name]
    return {finding.name: finding for finding in found}


async def test_a_stack_that_works_moves_blocks_and_is_judged(pipeline: Pipeline) -> None:
    await pipeline.start(*STAGES)
    report = await doctor.examine(pipeline.settings)
    found = of_model(report, pipeline.settings)
    assert [f for f in found.values() if f.status == "fail"] == []
    assert {f.status for f in report.broker} == {"ok"}
    assert found["kv-pairs"].found == "1 of 1 pairs moved blocks"
    judged = report.transfers[pipeline.settings.model.served_name]
    measured = [row for row in judged.rows if row.is_measured]
    assert [row.num_token_ids for row in measured] == [128, 512, 1024, 1096]
    assert all(row.kv_bytes > 0 and row.kv_s > 0 for row in measured)
    assert judged.gigabytes_per_s > 0
    assert "P/D" in judged.sentence


async def test_five_planted_faults_are_each_named(
    pipeline: Pipeline, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Any, params: Any) -> None:
        raise EngineRequestError("no way to this address")

    monkeypatch.setattr(FakeDecodeEngine, "warm_handshake", refuse)  # decode can't pull
    await pipeline.start(*STAGES)
    # a prefill worker with another block size
    other = msgspec.structs.replace(pipeline.settings.model, block_size=64)
    await pipeline.start(
        Role.PREFILL, settings=msgspec.structs.replace(pipeline.settings, model=other)
    )
    # one on another host that says "127.0.0.1", and one whose clock is behind
    contract = pipeline.heartbeat(Role.DECODE).contract
    far = beat(pipeline, "prefill-far", contract, process="other-host:1", kv_host="127.0.0.1")
    late = beat(pipeline, "prefill-late", contract, sent=time.time() - 30)
    # and settings by which decode's ranks can't read prefill's
    settings = settings_module.load(
        env={},
        overrides={
            **msgspec.to_builtins(pipeline.settings),
            "prefill": {"engine": {"tensor_parallel_size": 2}},
            "decode": {"engine": {"tensor_parallel_size": 3}},
        },
    )
    async with Announcing(pipeline, far, late):
        report = await doctor.examine(settings, move=False)
    found = {finding.name: finding for finding in report.findings}
    failed = {name for name, finding in found.items() if finding.status == "fail"}
    assert failed == {"pulls", "contracts", "side-channel", "clocks", "tensor-parallel"}
    assert "prefill-far" in found["side-channel"].found
    assert "prefill-late" in found["clocks"].found
    assert all(found[name].right and found[name].setting for name in failed)


async def test_a_prefill_worker_that_decode_shares_nothing_with_is_no_pair(
    pipeline: Pipeline,
) -> None:
    await pipeline.start(*STAGES)
    other = msgspec.structs.replace(pipeline.settings.model, block_size=64)
    await pipeline.start(
        Role.PREFILL, settings=msgspec.structs.replace(pipeline.settings, model=other)
    )
    found = of_model(await doctor.examine(pipeline.settings), pipeline.settings)
    assert found["contracts"].status == "fail"
    assert found["kv-pairs"].found == "1 of 1 pairs moved blocks"


async def test_prompts_that_decode_computes_itself_are_no_transfer(pipeline: Pipeline) -> None:
    decode = msgspec.structs.replace(pipeline.settings.decode, local_prefill_threshold=1e9)
    pipeline.settings = msgspec.structs.replace(pipeline.settings, decode=decode)
    await pipeline.start(*STAGES)
    found = of_model(await doctor.examine(pipeline.settings), pipeline.settings)
    assert found["kv-transfer"].status == "fail"
    assert "decode.local_prefill_threshold" in found["kv-transfer"].setting


async def test_a_stage_that_is_missing_keeps_the_probes_from_waiting(pipeline: Pipeline) -> None:
    await pipeline.start(Role.RENDER, Role.PREFILL, Role.DECODE)
    found = of_model(await doctor.examine(pipeline.settings), pipeline.settings)
    assert found["stages"].status == "fail"
    assert found["kv-transfer"].status == "skip"


async def test_the_command_prints_json_and_fails_with_a_check(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    await pipeline.start(Role.RENDER)

    async def run(*arguments: str) -> tuple[int, str]:
        options = build_parser().parse_args(["doctor", *arguments])
        code = await asyncio.to_thread(doctor.run, options, pipeline.settings)
        return code, capsys.readouterr().out

    code, printed = await run("--json")
    model = json.loads(printed)["models"][pipeline.settings.model.served_name]
    assert code == 1
    assert [f["name"] for f in model if f["status"] == "fail"] == ["stages", "contracts"]
    code, printed = await run()
    assert (code, "change: headrace serve" in printed) == (1, True)


async def test_before_there_is_a_stack_the_machine_and_its_settings_are_checked(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    up = msgspec.structs.replace(settings.up, engine="fake")
    options = build_parser().parse_args(["doctor", "--before"])
    for lease_s, code in ((30.0, 0), (1.0, 1)):
        nixl = msgspec.structs.replace(settings.nixl, lease_s=lease_s)
        planned = msgspec.structs.replace(settings, up=up, nixl=nixl)
        assert doctor.run(options, planned) == code
    assert "change: nixl.lease_s" in capsys.readouterr().out


async def test_a_broker_that_is_not_there_fails_the_check(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.operator_link.CONNECT_TIMEOUT_S", 0.2)
    away = msgspec.structs.replace(settings.broker, url="nats://127.0.0.1:1")
    report = await doctor.examine(msgspec.structs.replace(settings, broker=away))
    assert [(f.name, f.status, f.setting) for f in report.broker] == [
        ("broker", "fail", "broker.url")
    ]


def beat(pipeline: Pipeline, instance: str, contract: str, **fields: Any) -> Heartbeat:
    return Heartbeat(
        role=Role.PREFILL,
        instance=instance,
        model=pipeline.settings.model.served_name,
        contract=contract,
        state="ready",
        slots=1,
        num_running=0,
        **fields,
    )


class Announcing:
    """Workers that are not there say that they are, whenever the roll is called."""

    def __init__(self, pipeline: Pipeline, *beats: Heartbeat) -> None:
        self._broker = pipeline.broker
        self._beats = beats
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        self._subscription = await self._broker.subscribe(
            subjects.roll_call(), lambda _: self._tasks.add(asyncio.create_task(self._say()))
        )

    async def __aexit__(self, *_: object) -> None:
        await self._subscription.unsubscribe()
        await asyncio.gather(*self._tasks)

    async def _say(self) -> None:
        for heartbeat in self._beats:
            slug = subjects.model_slug(heartbeat.model)
            subject = subjects.heartbeat(slug, heartbeat.role, heartbeat.instance)
            await self._broker.publish(subject, wire.encode(heartbeat))
