"""API keys: who is let in, and whose the request is then."""

import asyncio
import json
import logging
import os

import httpx
import pytest
from prometheus_client import REGISTRY

from headrace.gateway.console import assets
from headrace.gateway.keyring import Keyring
from headrace.shared.api_keys import ApiKey, digest_of, line_of, new_key
from headrace.shared.errors import SettingsError
from headrace.shared.settings import GatewaySettings

ACME, GLOBEX = new_key(), new_key()
OPEN = {"/health", "/ready", *assets.load()}


@pytest.fixture
def keyring():
    return Keyring(
        {digest_of(ACME): ApiKey(tenant="acme"), digest_of(GLOBEX): ApiKey(tenant="globex")}, None
    )


@pytest.fixture
async def client(gateway):
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(gateway.app), base_url="http://gateway"
    ) as client:
        yield client


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_lets_in_and_says_whose_the_request_is(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    assert (await gateway.post(headers=bearer(ACME)).end()).status == 200
    assert (await gateway.post(headers={"authorization": f"bearer  {GLOBEX} "}).end()).status == 200
    assert [s.tenant for s in gateway.broker.submissions] == ["acme", "globex"]


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (None, "Authorization: Bearer <key>"),
        ("", "Authorization: Bearer <key>"),
        (ACME, "Authorization: Bearer <key>"),
        (f"Basic {ACME}", "Authorization: Bearer <key>"),
        ("Bearer ", "Authorization: Bearer <key>"),
        (f"Bearer {ACME}x", "not known here"),
        (f"Bearer {digest_of(ACME).hex()}", "not known here"),
        ("Bearer \xe9", "not known here"),
    ],
)
async def test_without_a_good_key_it_is_a_401_and_nothing_is_read(gateway, header, word):
    headers = {} if header is None else {"authorization": header}
    answer = await gateway.post(parts=[], is_complete=False, headers=headers).end()
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.error["type"] == "AuthenticationError"
    assert answer.error["code"] == 401
    assert word in answer.error["message"]
    assert "x-request-id" in answer.headers
    assert gateway.broker.submissions == []


async def test_a_call_without_a_good_key_is_counted_and_logged_by_the_id_of_its_answer(
    gateway, client, caplog
):
    caplog.set_level("INFO")
    labels = {"code": "401", "error": "unauthorized"}
    counter = "headrace_http_refused_requests_total"
    before = REGISTRY.get_sample_value(counter, labels) or 0
    answer = await client.get("/v1/models")
    (record,) = [r for r in caplog.records if getattr(r, "action", "") == "unauthorized"]
    assert record.request_id == answer.headers["x-request-id"]
    assert REGISTRY.get_sample_value(counter, labels) == before + 1


async def test_every_route_but_the_health_checks_needs_a_key(gateway, client):
    paths = {
        route.path.replace("{name:path}", "m")
        .replace("{request_id}", "r")
        .replace("{response_id}", "r"): route.methods
        for route in gateway.app.routes
    }
    assert OPEN < set(paths)
    assert len(paths) > 15
    for path, methods in [*paths.items(), ("/nothing", {"GET"}), ("//v1/models", {"GET"})]:
        for method in methods:
            status = (await client.request(method, f"http://gateway{path}")).status_code
            assert (status == 401) != (path in OPEN), (method, path, status)
    answer = await client.get("/v1/models", headers=bearer(ACME))
    assert answer.status_code == 200


async def test_a_question_is_the_tenants(gateway, client):
    asking = asyncio.ensure_future(
        client.post("/tokenize", json={"prompt": "x"}, headers=bearer(GLOBEX))
    )
    await gateway.broker.until(lambda: gateway.broker.asks)
    assert gateway.broker.asks[0][1].tenant == "globex"
    asking.cancel()


async def test_a_request_of_another_tenant_is_a_404(gateway, client, make):
    gateway.broker.script = lambda s: gateway.broker.send(s, make.terminal(s, body=b"{}"))
    await gateway.post(headers=bearer(ACME) | {"X-Request-Id": "r1"}).end()
    known = await client.get("/requests/r1", headers=bearer(ACME))
    assert (known.status_code, known.json()["tenant"]) == (200, "acme")
    foreign = await client.get("/requests/r1", headers=bearer(GLOBEX))
    unknown = await client.get("/requests/r1", headers=bearer(GLOBEX))
    assert (foreign.status_code, foreign.content) == (404, unknown.content)


async def test_two_tenants_may_use_the_same_request_id(gateway, make):
    gateway.broker.script = lambda s: gateway.broker.send(
        s, make.terminal(s, body=json.dumps({"of": s.tenant}).encode())
    )
    named = {"X-Request-Id": "r1"}
    answers = [await gateway.post(headers=bearer(key) | named).end() for key in (ACME, GLOBEX)]
    assert [answer.body for answer in answers] == [b'{"of": "acme"}', b'{"of": "globex"}']
    assert (await gateway.post(headers=bearer(ACME) | named).end()).status == 409


async def test_a_cancel_is_the_tenants(gateway):
    running = gateway.post(headers=bearer(GLOBEX))
    await gateway.broker.until(lambda: gateway.broker.submissions)
    running.hang_up()
    await running.end()
    await gateway.broker.until(lambda: gateway.broker.cancels)
    assert gateway.broker.cancels[0].tenant == "globex"


class TestFile:
    @pytest.fixture
    def file(self, tmp_path):
        file = tmp_path / "keys.toml"
        file.write_text(line_of(ACME, ApiKey(tenant="acme")) + "\n")
        return file

    @pytest.fixture
    def clock(self):
        return [1_800_000_000.0]

    @pytest.fixture
    def keys(self, file, clock):
        inline = {digest_of("from-the-environment"): ApiKey(tenant="default")}
        return Keyring(inline, file, now=lambda: clock[0])

    def test_keys_of_file_and_settings_are_good(self, keys):
        assert keys.is_on
        assert keys.owner_of(ACME).tenant == "acme"
        assert keys.owner_of("from-the-environment").tenant == "default"
        assert keys.owner_of(GLOBEX) is None

    def test_a_changed_file_is_read_at_the_second_look(self, keys, file):
        file.write_text(line_of(GLOBEX, ApiKey(tenant="globex")))
        keys.look()
        assert keys.owner_of(ACME)
        keys.look()
        assert keys.owner_of(ACME) is None
        assert keys.owner_of(GLOBEX).tenant == "globex"
        assert keys.owner_of("from-the-environment")

    def test_a_file_put_in_its_place_is_read(self, keys, file):
        before = os.stat(file)
        new = file.with_suffix(".new")
        text = line_of(GLOBEX, ApiKey(tenant="acme"))
        assert len(text) + 1 == before.st_size
        new.write_text(text + "\n")
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
        new.replace(file)
        keys.look()
        keys.look()
        assert keys.owner_of(GLOBEX)

    @pytest.mark.parametrize("text", ["x = ", f'"{ACME}" = {{ tenant = "a" }}', "\0"])
    def test_a_broken_file_keeps_the_old_keys_and_says_so_once(self, keys, file, text, caplog):
        file.write_text(text)
        for _ in range(4):
            keys.look()
        assert keys.owner_of(ACME)
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert record.action == "api_keys_failed"
        assert str(file) in record.getMessage()
        assert ACME not in record.getMessage()
        file.write_text(line_of(GLOBEX, ApiKey(tenant="globex")))
        keys.look()
        keys.look()
        assert keys.owner_of(GLOBEX)

    def test_a_file_that_goes_away_keeps_the_old_keys(self, keys, file, caplog):
        file.unlink()
        for _ in range(3):
            keys.look()
        assert keys.owner_of(ACME)
        assert len(caplog.records) == 1

    def test_a_file_that_could_not_be_read_for_a_while_is_read_then(
        self, keys, file, monkeypatch, caplog
    ):
        def denied(path):
            raise PermissionError(13, "Permission denied")

        file.write_text(line_of(GLOBEX, ApiKey(tenant="globex")))
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.read_text", denied)
            for _ in range(3):
                keys.look()
        assert keys.owner_of(ACME)
        assert [r.action for r in caplog.records] == ["api_keys_failed"]
        keys.look()  # `chmod` changes neither size nor time of a file
        assert keys.owner_of(ACME) is None
        assert keys.owner_of(GLOBEX)

    def test_a_file_without_a_key_lets_nobody_in(self, keys, file, caplog):
        file.write_text("# revoked\n")
        keys.look()
        keys.look()
        assert keys.owner_of(ACME) is None
        assert keys.is_on
        assert "holds no API key" in caplog.text

    def test_a_key_is_good_until_it_expires(self, keys, file, clock):
        file.write_text(
            f'"sha256:{digest_of(GLOBEX).hex()}" = '
            '{ tenant = "globex", expires = 2027-01-15T08:00:01Z }'
        )
        keys.look()
        keys.look()
        assert keys.owner_of(GLOBEX)  # the clock stands at 08:00:00
        clock[0] += 1
        assert keys.owner_of(GLOBEX) is None

    async def test_the_file_is_watched(self, keys, file, monkeypatch):
        read = asyncio.Event()
        loop = asyncio.get_running_loop()
        monkeypatch.setattr("headrace.gateway.keyring.POLL_S", 0.001)
        look = keys.look

        def looked():
            look()
            if keys.owner_of(GLOBEX):
                loop.call_soon_threadsafe(read.set)

        monkeypatch.setattr(keys, "look", looked)
        watching = asyncio.create_task(keys.watch())
        file.write_text(line_of(GLOBEX, ApiKey(tenant="globex")))
        await asyncio.wait_for(read.wait(), 60)
        watching.cancel()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"api_keys_file": "/nowhere/keys.toml"}, "/nowhere/keys.toml: No such file"),
        ({"api_keys": "long-enough-secret, short"}, "key 2 has 5 characters"),
        ({"api_keys": "a.b:long-enough-secret"}, "key 1: the tenant"),
    ],
)
def test_keys_that_can_not_be_read_stop_the_start(settings, word):
    with pytest.raises(SettingsError, match=word) as caught:
        Keyring.of(GatewaySettings(**settings))
    assert "gateway.api_keys" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_keys_of_the_settings_may_name_their_tenant():
    keys = Keyring.of(GatewaySettings(tenant="mine", api_keys=f" {ACME} ,globex:{GLOBEX},"))
    assert keys.owner_of(ACME).tenant == "mine"
    assert keys.owner_of(GLOBEX).tenant == "globex"


def test_no_key_is_needed_where_none_is_named():
    assert not Keyring.of(GatewaySettings()).is_on
