"""The whole pipeline as a deployment runs it: the broker's own users, API keys; and nothing secret in any log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from headrace.cli.doctor import run as doctor
from headrace.cli.logs import HumanFormatter, JsonFormatter
from headrace.shared import subjects, wire
from headrace.shared.api_keys import ApiKey, line_of, new_key
from headrace.shared.broker import Received
from headrace.shared.messages import Terminal
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import Settings
from headrace.shared.subjects import Lane, Role

from ...conftest import Serve
from ..broker import deployed
from .conftest import STAGES, Engines, Pipeline
from .test_flow import expected_text

ACME, GLOBEX = new_key(), new_key()
SECRET = "Xq7-the-clients-own-words-Zk9"
LONG = {"max_tokens": 2_000, "ignore_eos": True}


@pytest_asyncio.fixture
async def nats_server(serve: Serve, tmp_path: Path) -> NatsServer:
    """A server with the deployment's users."""
    return await serve(deployed.server(tmp_path, deployed.CONFIG.read_text()))


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    keys = tmp_path / "keys.toml"
    lines = [line_of(ACME, ApiKey(tenant="acme")), line_of(GLOBEX, ApiKey(tenant="globex"))]
    keys.write_text("\n".join(lines))
    replace = msgspec.structs.replace
    return replace(
        settings,
        broker=replace(settings.broker, user="admin", password="pw-admin"),
        gateway=replace(settings.gateway, api_keys_file=str(keys)),
    )


async def start(pipeline: Pipeline, *roles: Role) -> None:
    """Start services, each as its role's user."""
    for role in roles:
        broker = msgspec.structs.replace(pipeline.settings.broker, user="", password=f"pw-{role}")
        await pipeline.start(
            role, settings=msgspec.structs.replace(pipeline.settings, broker=broker)
        )


def as_tenant(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def completion(pipeline: Pipeline, prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": pipeline.settings.model.served_name,
        "prompt": prompt,
        "max_tokens": 32,
        **more,
    }


def denied(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "permission" in r.getMessage().lower()]


async def test_every_kind_of_request_works_with_each_roles_own_user(
    pipeline: Pipeline, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await start(pipeline, Role.GATEWAY, *STAGES)
    for key, name in ((ACME, "acme"), (GLOBEX, "globex")):
        named = as_tenant(key) | {"X-Request-Id": "the-same"}
        answer = await client.post(
            "/v1/completions", json=completion(pipeline, f"for {name}"), headers=named
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(f"for {name}", 32)
        record = (await client.get("/requests/the-same", headers=as_tenant(key))).json()
        assert (record["tenant"], record["timings"]["prefill_mode"]) == (name, "remote")
    streamed = await client.post(
        "/v1/completions",
        json=completion(pipeline, "streamed", stream=True),
        headers=as_tenant(ACME),
    )
    assert streamed.text.endswith("data: [DONE]\n\n")
    asked = await client.post(
        "/tokenize",
        json={"model": pipeline.settings.model.served_name, "prompt": "ab"},
        headers=as_tenant(ACME),
    )
    assert asked.json()["tokens"] == [97, 98]
    large = await client.post(
        "/v1/completions",
        json=completion(pipeline, "x", user="y" * 5_000_000),
        headers=as_tenant(ACME),
    )
    assert large.status_code == 200
    assert (await client.get("/workers")).status_code == 401
    assert (await client.get("/ready")).status_code == 200
    assert denied(caplog) == []


async def test_the_console_shows_a_tenant_how_long_queues_are_with_the_gateways_own_user(
    pipeline: Pipeline, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await start(pipeline, Role.GATEWAY, *STAGES)
    state = (await client.get("/console/state", headers=as_tenant(ACME))).json()
    assert (state["tenant"], state["trouble"]) == ("acme", "")
    assert {queue["stage"] for queue in state["queues"]} == {"render", "decode", "prefill"}
    assert len(state["workers"]) == 4
    assert not any("process" in worker for worker in state["workers"])
    assert denied(caplog) == []


@pytest.mark.parametrize(("user", "moves"), [("admin", True), ("gateway", False)])
async def test_the_doctor_works_with_the_rights_that_its_user_has(
    pipeline: Pipeline, user: str, moves: bool
) -> None:
    await start(pipeline, *STAGES)
    replace = msgspec.structs.replace
    broker = replace(pipeline.settings.broker, user=user, password=f"pw-{user}")
    report = await doctor.examine(replace(pipeline.settings, broker=broker), move=moves)
    (store,) = [finding for finding in report.broker if finding.name == "jetstream"]
    assert store.status == ("ok" if user == "admin" else "skip")
    assert [finding.name for finding in report.findings if finding.status == "fail"] == []
    assert bool(report.transfers) == moves


async def test_a_batch_job_works_with_each_roles_own_user(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    await start(pipeline, *STAGES)
    ends: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe(subjects.res("acme", "b1"), ends.put_nowait)
    body = json.dumps(completion(pipeline, "in bulk")).encode()
    req = subjects.req("acme", pipeline.settings.model.served_name, Lane.BULK)
    headers = {"Hr-Endpoint": "completions", "Hr-Request-Id": "b1"}
    await pipeline.broker.publish_durable(req, body, message_id="b1", headers=headers)
    end = wire.decode((await ends.get()).payload, Terminal)
    assert json.loads(end.body)["choices"][0]["text"] == expected_text("in bulk", 32)
    assert denied(caplog) == []


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DERENDER])
async def test_what_saves_a_request_works_with_each_roles_own_user(
    pipeline: Pipeline,
    client: httpx.AsyncClient,
    held: Engines,
    caplog: pytest.LogCaptureFixture,
    role: Role,
) -> None:
    await start(pipeline, Role.GATEWAY, *STAGES)
    request = asyncio.create_task(
        client.post("/v1/completions", json=completion(pipeline, "saved"), headers=as_tenant(ACME))
    )
    await held.decode[0].wait_until(lambda stats: stats.num_running == 1)
    held.hold_decode = False
    victim = next(service for service in pipeline.services if service.role is role)
    await start(pipeline, role)
    await victim.kill()
    held.decode[0].release()
    answer = await request
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text("saved", 32)
    assert denied(caplog) == []


class Everything(logging.Handler):
    """All that any logger says, in each form in which it could be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("httpx", "httpcore")):  # the test's own client
            return
        fields = {k: v for k, v in record.__dict__.items() if k != "exc_info"}
        formats = (HumanFormatter().format(record), JsonFormatter().format(record))
        self.texts.append(" ".join((*formats, repr(fields))))


@pytest.fixture
def everything() -> Iterator[Everything]:
    root = logging.getLogger()
    level, handler = root.level, Everything()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


async def leave(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Ask for a stream, and hang up after its first line."""
    async with client.stream(
        "POST", "/v1/completions", json=body, headers=as_tenant(ACME)
    ) as answer:
        assert await anext(answer.aiter_lines())


async def test_no_log_holds_a_prompt_a_key_or_a_password(
    pipeline: Pipeline, client: httpx.AsyncClient, engines: Engines, everything: Everything
) -> None:
    await start(pipeline, Role.GATEWAY, *STAGES)
    key, model = as_tenant(ACME), pipeline.settings.model.served_name
    statuses = []

    async def post(path: str, body: Any, headers: dict[str, str] = key) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        typed = headers | {"content-type": "application/json"}
        statuses.append((await client.post(path, content=content, headers=typed)).status_code)

    await post("/v1/completions", completion(pipeline, SECRET))
    await post("/v1/completions", completion(pipeline, SECRET, stream=True, cache_salt=SECRET))
    chat = {"model": model, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    await post("/v1/chat/completions", chat)
    await post("/tokenize", {"model": model, "prompt": SECRET})
    assert statuses == [200] * 4
    await post("/v1/chat/completions", chat | {"messages": [{"role": SECRET, "content": SECRET}]})
    await post("/v1/completions", completion(pipeline, SECRET, n=SECRET))
    await post("/v1/completions", completion(pipeline, SECRET) | {"model": SECRET})
    await post("/v1/completions", completion(pipeline, SECRET, stream=SECRET))
    await post("/v1/completions", f'{{"prompt": "{SECRET}'.encode())
    await post("/tokenize", {"model": model, "prompt": [SECRET]})
    assert statuses[4:] == [400, 400, 404, 400, 400, 400]
    await post("/v1/completions", completion(pipeline, SECRET), as_tenant(SECRET))
    await post("/v1/completions", completion(pipeline, SECRET), {"Authorization": f"Basic {ACME}"})
    assert statuses[10:] == [401, 401]
    engines.prefill[0].faults.fail_next = 1
    engines.decode[0].faults.fail_next = 5
    await post("/v1/completions", completion(pipeline, SECRET))
    engines.decode[0].faults.fail_next = 0
    assert statuses[12:] == [500]
    engines.decode[0].faults.hold = True
    late = asyncio.create_task(
        post("/v1/completions", completion(pipeline, SECRET), key | {"X-Request-Timeout": "0.5"})
    )
    await late
    engines.decode[0].faults.hold = False
    engines.decode[0].release()
    assert statuses[13:] == [504]
    await leave(client, completion(pipeline, SECRET, stream=True, **LONG))
    letters: asyncio.Queue[Received] = asyncio.Queue()
    await pipeline.broker.subscribe("hr.v1.dlq.>", letters.put_nowait)
    unreadable = [
        (subjects.req("acme", model, Lane.RT), {"Hr-Request-Id": "a b"}),
        (f"{subjects.ROOT}.job.{pool_of(pipeline)}.acme.rt", {}),
        (f"{subjects.ROOT}.pf.{pool_of(pipeline)}.rt", {}),
    ]
    for number, (subject, headers) in enumerate(unreadable):
        await pipeline.broker.publish_durable(
            subject, SECRET.encode(), message_id=f"{SECRET}.{number}", headers=headers
        )
        await letters.get()
    forbidden = {SECRET, json.dumps(SECRET)[1:-1], ", ".join(map(str, SECRET.encode()))}
    forbidden |= {ACME, GLOBEX, ACME[3:20], *(f"pw-{role}" for role in [*Role, "admin"])}
    for service in reversed(pipeline.services):
        await service.drain()
    assert len(everything.texts) > 50
    found = [text for text in everything.texts if any(word in text for word in forbidden)]
    assert found == []


def pool_of(pipeline: Pipeline) -> str:
    decode = pipeline.heartbeat(Role.DECODE)
    return subjects.pool(decode.model, decode.contract)
