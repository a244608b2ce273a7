"""What `/console` needs of the gateway: its files for everybody, its state for whoever has a key."""

from types import SimpleNamespace

import httpx
import pytest

from headrace.gateway.app import create_app
from headrace.gateway.ask import Asker
from headrace.gateway.console import assets
from headrace.gateway.console.state import LOOK_S, Console
from headrace.gateway.keyring import Keyring
from headrace.gateway.recent import Record
from headrace.shared.api_keys import ApiKey, digest_of, new_key
from headrace.shared.broker import DeniedError, Kept, QueueInfo
from headrace.shared.errors import BrokerError
from headrace.shared.queue_look import STREAMS
from headrace.shared.subjects import Lane, Role, job_filter, pool, req_filter

ACME, OPS = new_key(), new_key()
ABOUT = {
    "version": "1",
    "needs_key": False,
    "is_operator": True,
    "is_draining": False,
    "num_running": 0,
}


class Admin:
    """What the broker says of its queues: 2 requests that wait, 1 job of each of two contracts."""

    def __init__(self):
        self.num_looks = 0
        self.may_see_messages = True
        self.is_away = False

    async def queues(self, stream):
        if self.is_away:
            raise BrokerError("the broker is away")
        self.num_looks += stream == STREAMS[0]
        waiting = {
            "HR_REQ": [(req_filter("m", Lane.BULK), 2), (req_filter("unserved", Lane.BULK), 5)],
            "HR_JOB": [(job_filter(pool("m", c), Lane.STD), 1) for c in ("c", "d")],
        }
        return [
            QueueInfo(
                filter_subject=subject,
                num_waiting=num,
                num_taken=1,
                num_deliveries=3,
                last_delivered=3,
            )
            for subject, num in waiting.get(stream, ())
        ]

    async def first(self, stream, pattern, *, first_seq=0, num=1):
        if not self.may_see_messages:
            raise DeniedError("may not")
        return [Kept(sequence=first_seq, stored=1_000.0, received=None)]


@pytest.fixture
def admin(gateway, make):
    gateway.broker.admin = Admin()
    gateway.workers.beats.append(make.beat(Role.DECODE, contract="d"))
    return gateway.broker.admin


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def console(gateway, clock, admin):
    return Console(gateway.link, gateway.handler.recent, now=lambda: clock.now)


def client_of(gateway, **options):
    app = create_app(
        gateway.link,
        gateway.handler,
        Asker(gateway.link, timeout_s=1.0),
        max_body_bytes=1_000,
        pace=gateway.pace,
        tenant="default",
        **options,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def keys():
    owners = {ACME: "acme", OPS: "ops"}
    return Keyring({digest_of(key): ApiKey(tenant=owner) for key, owner in owners.items()}, None)


def record(request_id, tenant):
    return Record(
        request_id=request_id,
        tenant=tenant,
        model="m",
        endpoint="completions",
        stream=False,
        accepted=1_000.0,
    )


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_the_page_needs_no_key_and_lets_nothing_in_from_elsewhere(gateway):
    async with client_of(gateway, keyring=keys()) as client:
        for path in assets.load():
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/console/state")).status_code == 401
        assert (await client.get("/console/nothing")).status_code == 401


def test_the_page_asks_only_for_files_that_there_are():
    files = assets.load()
    page = files["/console"].content.decode()
    named = [part.split('"')[0] for part in page.split('="/console/')[1:]]
    assert {"main.js", "layout.css", "icon.svg"} <= set(named)
    for path, file in files.items():
        if path.endswith(".js"):
            named += [p.split('"')[0] for p in file.content.decode().split('from "./')[1:]]
    assert {f"/console/{name}" for name in named} <= files.keys()
    assert len(files) == len(set(named)) + 2  # the page, by its two paths


async def test_a_tenant_sees_its_own_requests_newest_first(gateway, admin):
    for request_id, tenant in (("r1", "acme"), ("r2", "globex"), ("r3", "acme")):
        gateway.handler.recent.add(record(request_id, tenant))
    async with client_of(gateway, keyring=keys()) as client:
        state = (await client.get("/console/state", headers=bearer(ACME))).json()
    assert [shown["request_id"] for shown in state["requests"]] == ["r3", "r1"]
    assert (state["tenant"], state["needs_key"]) == ("acme", True)


@pytest.mark.parametrize(
    ("key", "operators", "sees"),
    [(ACME, {"ops"}, False), (OPS, {"ops"}, True), (OPS, set(), False)],
    ids=["another", "operator", "no operators"],
)
async def test_where_workers_run_is_for_operators(gateway, admin, make, key, operators, sees):
    gateway.workers.beats.append(make.beat(Role.PREFILL, process="host-7:4242"))
    async with client_of(gateway, keyring=keys(), operators=operators) as client:
        for path, name in (("/workers", "data"), ("/console/state", "workers")):
            answer = await client.get(path, headers=bearer(key))
            assert ("host-7" in answer.text) == sees, path
            assert len(answer.json()[name]) == 5


async def test_without_keys_everybody_is_an_operator(gateway, admin, make):
    gateway.workers.beats.append(make.beat(Role.PREFILL, process="host-7:4242"))
    async with client_of(gateway, keyring=Keyring({}, None)) as client:
        assert "host-7" in (await client.get("/workers")).text


async def test_queues_are_those_of_served_models_and_contracts_are_one(console):
    queues = (await console.state("default", **ABOUT)).queues
    assert [(q.stage, q.model, q.lane, q.num_waiting, q.num_taken) for q in queues] == [
        ("decode", "m", "std", 2, 2),
        ("render", "m", "bulk", 2, 1),
    ]
    assert all(queue.oldest_s > 0 for queue in queues)


async def test_the_broker_is_asked_once_a_second_however_many_look(console, admin, clock):
    for _ in range(5):
        await console.state("default", **ABOUT)
    assert admin.num_looks == 1
    clock.now += LOOK_S
    await console.state("default", **ABOUT)
    assert admin.num_looks == 2


async def test_a_user_that_may_not_look_into_queues_has_ages_from_the_workers(
    console, admin, gateway, make
):
    admin.may_see_messages = False
    gateway.workers.beats += [
        make.beat(Role.DECODE, contract=contract, oldest_wait_s=waits_s)
        for contract, waits_s in (
            ("c", {Lane.STD: 4.0, Lane.RT: 9.0}),
            ("d", {Lane.STD: 6.0}),
            ("e", {Lane.STD: 8.0}),  # of a contract that none of the queues is for
        )
    ]
    queues = (await console.state("default", **ABOUT)).queues
    shown = [(queue.stage, queue.lane, queue.num_waiting, queue.oldest_s) for queue in queues]
    assert shown == [("decode", "std", 2, 6.0), ("render", "bulk", 2, None)]


async def test_a_broker_that_is_away_is_said_and_the_workers_stay(console, admin, gateway):
    admin.is_away = True
    state = await console.state("default", **ABOUT)
    assert (state.trouble, state.queues, len(state.workers)) == ("the broker is away", None, 4)
    gateway.broker.is_connected = False
    state = await console.state("default", **ABOUT)
    assert (state.workers, state.models) == ([], {})
    assert "not connected" in state.trouble
