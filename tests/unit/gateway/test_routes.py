"""The routes beside the two that create something."""

import httpx
import msgspec
import pytest

from headrace.shared.subjects import Role


@pytest.fixture
async def client(gateway):
    transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_health_needs_no_broker(gateway, client):
    gateway.broker.is_connected = False
    assert (await client.get("/health")).status_code == 200


async def test_models_are_what_the_workers_announce(gateway, client, make):
    gateway.workers.beats.append(make.beat(Role.DECODE, "b", max_model_len=4096))
    gateway.workers.beats.append(make.beat(Role.RENDER, "b", max_model_len=2048))
    gateway.workers.beats.append(make.beat(Role.GATEWAY, ""))
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in body["data"]] == [
        ("b", "model", 2048),
        ("m", "model", None),
    ]
    assert body["data"][0]["permission"][0]["object"] == "model_permission"


async def test_one_model_is_retrieved_by_its_name_slashes_and_all(gateway, client, make):
    gateway.workers.beats.append(make.beat(Role.DECODE, "org/b", max_model_len=4096))
    listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["m", "org/b"]
    for card in listed:
        assert (await client.get(f"/v1/models/{card['id']}")).json() == card
    assert (await client.get("/v1/models/")).json()["data"] == listed


async def test_a_model_that_nobody_serves_is_not_found(gateway, client):
    answer = await client.get("/v1/models/nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "The model `nobody` does not exist. Valid aliases: m."
    )
    gateway.workers.beats.clear()
    answer = await client.get("/v1/models/m")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    gateway.broker.is_connected = False
    assert (await client.get("/v1/models/m")).status_code == 503


async def test_ready_names_the_stages(client):
    answer = await client.get("/ready")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ready",
        "models": {
            "m": {
                "ready": True,
                "stages": {"render": 1, "decode": 1, "derender": 1, "prefill": 0},
                "missing": [],
                "num_contracts": 1,
                "prefill": "local",
            }
        },
    }


async def test_ready_says_where_prompts_are_computed(gateway, client, make):
    async def where():
        return (await client.get("/ready")).json()["models"]["m"]["prefill"]

    gateway.workers.beats.append(make.beat(Role.PREFILL))
    assert await where() == "remote"
    (decode,) = [beat for beat in gateway.workers.beats if beat.role is Role.DECODE]
    gateway.workers.beats.remove(decode)
    gateway.workers.beats.append(msgspec.structs.replace(decode, is_colocated=True))
    assert await where() == "colocated"


@pytest.mark.parametrize("role", [Role.RENDER, Role.DECODE, Role.DERENDER])
@pytest.mark.parametrize("how", ["gone", "draining", "another contract"])
async def test_not_ready_without_a_stage_of_the_same_contract(gateway, client, make, role, how):
    beats = [beat for beat in gateway.workers.beats if beat.role is not role]
    if how == "draining":
        beats.append(make.beat(role, state="draining"))
    if how == "another contract":
        beats.append(make.beat(role, contract="other"))
    gateway.workers.beats = beats
    answer = await client.get("/ready")
    assert answer.status_code == 503
    report = answer.json()["models"]["m"]
    assert report["ready"] is False
    assert report["missing"] == ([] if how == "another contract" else [str(role)])


async def test_prefill_is_reported_but_not_needed(gateway, client, make):
    gateway.workers.beats.append(make.beat(Role.PREFILL))
    report = (await client.get("/ready")).json()["models"]["m"]
    assert (report["prefill"], report["stages"]["prefill"]) == ("remote", 1)


async def test_not_ready_without_a_broker_or_while_draining(gateway, client):
    gateway.broker.is_connected = False
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/v1/models")).status_code == 503
    gateway.broker.is_connected = True
    await gateway.handler.drain(1)
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")


async def test_a_recent_request_can_be_looked_up(gateway, client, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post(headers={"X-Request-Id": "r1"}).end()
    record = (await client.get("/requests/r1")).json()
    assert (record["request_id"], record["status"], record["http_status"]) == ("r1", "ok", 200)
    assert record["model"] == "m"
    answer = await client.get("/requests/r2")
    assert answer.status_code == 404
    assert "`r2`" in answer.json()["error"]["message"]


async def test_unknown_routes_and_methods_get_openai_errors(client):
    answer = await client.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "Not Found",
        "type": "Not Found",
        "param": None,
        "code": 404,
    }
    answer = await client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "Method Not Allowed"


async def test_an_unexpected_error_is_a_500_without_its_insides(gateway, client):
    gateway.broker.refuse = ZeroDivisionError("inside")
    answer = await client.post("/v1/completions", json={"model": "m"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error"
    assert gateway.handler.num_running == 0


async def test_version_is_told(client):
    assert set((await client.get("/version")).json()) == {"version"}


async def test_a_gateway_that_never_reached_the_broker_is_alive_and_not_ready(gateway, client):
    gateway.link._broker = None
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 503
