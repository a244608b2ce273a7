"""A tenant's own services on NATS: they reach what is theirs, and nothing else, whatever they try."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from headrace.shared import subjects
from headrace.shared.broker import Broker, WorkQueue
from headrace.shared.errors import BrokerError
from headrace.shared.events import Events
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane
from headrace.shared.submission import Submission

from ...conftest import Serve
from . import deployed

OUT, RES = subjects.out("acme", "r1"), subjects.res("acme", "r1")
FOREIGN_OUT, FOREIGN_RES = subjects.out("globex", "r1"), subjects.res("globex", "r1")
LAST = "$JS.API.DIRECT.GET"


def with_tenants(*names: str) -> str:
    """Return the deployment's configuration with an account for each tenant."""
    text = deployed.CONFIG.read_text()
    found = deployed.block(text, "acme")
    others = [
        found.replace("acme", name).replace("ACME", name.upper())
        for name in names
        if name != "acme"
    ]
    text = text.replace(found, "".join([found, *others]))
    for name in names:
        text = deployed.turned_on(text, name)
    return text


@pytest_asyncio.fixture
async def server(serve: Serve, tmp_path: Path) -> NatsServer:
    passwords = {"HEADRACE_ACME_PASSWORD": "pw-acme", "HEADRACE_GLOBEX_PASSWORD": "pw-globex"}
    return await serve(deployed.server(tmp_path, with_tenants("acme", "globex"), passwords))


@pytest_asyncio.fixture
async def ours(server: NatsServer) -> AsyncIterator[Broker]:
    """The pipeline's side."""
    settings = BrokerSettings(url=server.url, password="pw-admin")
    broker = await Broker.connect(settings, role="admin", name="test")
    await broker.declare_model("m")
    yield broker
    await broker.close()


class Service:
    """A service of a tenant: plain NATS, no code of ours."""

    def __init__(self) -> None:
        self.nats = Client()
        self.heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def listen(self, subject: str) -> None:
        async def keep(message: Msg) -> None:
            self.heard.put_nowait((message.subject, message.data))

        await self.nats.subscribe(subject, cb=keep)
        await self.flush()

    async def ask(self, subject: str) -> None:
        answer = await self.nats.request(subject, b"{}", timeout=30)
        if b"JetStream not enabled for account" in answer.data:  # said by its own account
            raise NoRespondersError

    async def flush(self) -> None:
        for _ in range(2):  # the first one may overtake what nats-py still holds back
            await self.nats.flush()

    async def next(self) -> tuple[str, bytes]:
        return await asyncio.wait_for(self.heard.get(), 30)


@pytest_asyncio.fixture
async def acme(server: NatsServer, ours: Broker) -> AsyncIterator[Service]:
    service = Service()
    await service.nats.connect(server.url, user="acme", password="pw-acme")
    yield service
    await service.nats.close()


async def end(ours: Broker, out: str, res: str, payload: bytes) -> None:
    await ours.publish_durable(out, payload, message_id=f"{out}.end")
    await ours.publish_durable(res, payload, message_id=f"{res}.end")


async def test_a_tenant_submits_cancels_and_reads_its_answers(ours: Broker, acme: Service) -> None:
    cancels: asyncio.Queue[bytes] = asyncio.Queue()
    await ours.subscribe(subjects.cancel_all(), lambda r: cancels.put_nowait(r.payload))
    for subject in ("hr.v1.out.acme.*", "hr.v1.res.acme.*", "hr.v1.reply.acme.*"):
        await acme.listen(subject)
    req = subjects.req("acme", "m", Lane.STD)
    ack = await acme.nats.request(req, b'{"model":"m"}', headers={"Nats-Msg-Id": "r1"})
    assert json.loads(ack.data)["stream"] == "HR_REQ"
    delivery = await ours.take(WorkQueue.req("m", Lane.STD), wait_s=30)
    assert delivery is not None
    taken = Submission.from_received(delivery.subject, delivery.headers, delivery.payload, now=0.0)
    assert (taken.tenant, taken.request_id) == ("acme", "r1")
    await acme.nats.publish(subjects.cancel("acme", "r1"), b"cancel")
    assert await asyncio.wait_for(cancels.get(), 30) == b"cancel"
    await end(ours, OUT, RES, b"end")
    await ours.publish(subjects.reply("acme", "here"), b"end")
    heard = {(await acme.next()) for _ in range(3)}
    assert heard == {(s, b"end") for s in (OUT, RES, subjects.reply("acme", "here"))}
    for stream, subject in (("HR_OUT", OUT), ("HR_RES", RES)):
        assert (await acme.nats.request(f"{LAST}.{stream}.{subject}", b"")).data == b"end"


async def test_a_tenant_hears_of_its_own_events_alone(ours: Broker, acme: Service) -> None:
    events = Events(ours, ())
    await acme.listen("hr.v1.ev.*.*.*")
    for tenant in ("globex", "acme"):
        await events.batch(tenant, "b1", "completed", {})
    subject, payload = await acme.next()
    assert subject == subjects.event("acme", "batch", "completed")
    assert json.loads(payload)["id"] == "acme.b1.completed"
    assert acme.heard.empty()


async def test_a_full_queue_is_told_to_the_tenant(ours: Broker, acme: Service) -> None:
    body = json.dumps({"seq": 1}).encode()
    answer = await acme.nats.request(
        subjects.req("acme", "m", Lane.STD),
        body,
        headers={"Nats-Msg-Id": "x", "Nats-Expected-Last-Sequence": "9"},
    )
    assert "error" in json.loads(answer.data)


async def test_a_tenant_hears_nothing_of_another(ours: Broker, acme: Service) -> None:
    await acme.listen(">")
    await end(ours, FOREIGN_OUT, FOREIGN_RES, b"foreign")
    await ours.publish(subjects.reply("globex", "here"), b"foreign")
    await ours.publish_durable(subjects.blob("b1"), b"foreign", message_id="b1.0")
    await ours.publish(subjects.kv("decode-1"), b"foreign")
    await end(ours, OUT, RES, b"mine")
    heard = [(await acme.next()) for _ in range(2)]
    assert {payload for _, payload in heard} == {b"mine"}
    assert acme.heard.empty()


@pytest.mark.parametrize(
    "subject",
    [
        subjects.req("globex", "m", Lane.RT),
        subjects.cancel("globex", "r1"),
        FOREIGN_OUT,
        OUT,
        RES,
        subjects.job("m", "acme", Lane.RT),
        subjects.prefill("m", Lane.RT),
        subjects.kv("decode-1"),
        subjects.frames("derender-1"),
        subjects.blob("b1"),
        subjects.roll_call(),
        subjects.ping("decode-1"),
        subjects.render_ask("m"),
        f"{LAST}.HR_OUT.{FOREIGN_OUT}",
        f"{LAST}.HR_RES.{FOREIGN_RES}",
        f"{LAST}.HR_OUT",
        f"{LAST}.HR_BLOB",
        f"{LAST}.HR_BLOB.{subjects.blob('b1')}",
        "$JS.API.STREAM.MSG.GET.HR_OUT",
        f"$JS.API.CONSUMER.CREATE.HR_OUT.c.{OUT}",
        "$JS.API.CONSUMER.MSG.NEXT.HR_REQ_RT.m_rt",
        "$JS.ACK.HR_JOB_RT.m_rt.1.1.1.1.1",
        "$JS.API.STREAM.PURGE.HR_REQ",
    ],
)
async def test_a_tenant_reaches_nothing_else(ours: Broker, acme: Service, subject: str) -> None:
    await end(ours, FOREIGN_OUT, FOREIGN_RES, b"foreign")
    heard: list[str] = []
    if subject.startswith(subjects.ROOT):
        await ours.subscribe(subject, lambda received: heard.append(received.subject))
    with pytest.raises(NoRespondersError):
        await acme.ask(subject)
    assert heard == []


@pytest.mark.parametrize(
    ("subject", "payload"),
    [(f"{LAST}.HR_OUT.{OUT}", b""), (subjects.req("acme", "m", Lane.STD), b"{}")],
)
async def test_no_answer_of_the_broker_becomes_another_tenants_message(
    ours: Broker, acme: Service, subject: str, payload: bytes
) -> None:
    """Who asks names the subject of the answer, and so would publish with the broker's rights."""
    await end(ours, OUT, RES, b"forged")
    await acme.listen(FOREIGN_OUT)
    await acme.nats.publish(subject, payload, reply=FOREIGN_OUT, headers={"Nats-Msg-Id": "r2"})
    assert (await acme.next())[0] == FOREIGN_OUT  # it stays in the tenant's own account
    assert await ours.replay(FOREIGN_OUT) == []


async def test_an_account_can_not_take_another_tenants_name(tmp_path: Path) -> None:
    text = with_tenants("acme").replace('subject: "hr.v1.req.acme', 'subject: "hr.v1.req.globex')
    server = deployed.server(tmp_path, text, {"HEADRACE_ACME_PASSWORD": "pw-acme"})
    with pytest.raises(BrokerError, match="import not authorized"):
        await server.start()


async def test_nobody_gets_in_without_a_password(server: NatsServer) -> None:
    with pytest.raises(BrokerError, match="refuses user"):
        await Broker.connect(BrokerSettings(url=server.url), role="gateway", name="1")


async def test_no_error_shows_the_password_of_an_address(server: NatsServer) -> None:
    url = server.url.replace("//", "//me:secret@")
    with pytest.raises(BrokerError) as caught:
        await Broker.connect(BrokerSettings(url=url), role="gateway", name="1")
    assert server.url in str(caught.value)
    assert "secret" not in str(caught.value)
