"""Where other workers reach this one, when `nixl.host` is "auto"."""

from __future__ import annotations

import socket

import msgspec
import pytest

from headrace.cli import serve, side_channel
from headrace.shared.errors import SettingsError
from headrace.shared.settings import BrokerSettings, NixlSettings, Settings
from headrace.shared.subjects import Role


def settings(url: str, host: str = "auto") -> Settings:
    return Settings(broker=BrokerSettings(url=url), nixl=NixlSettings(host=host))


def test_an_address_that_is_set_stays() -> None:
    named = settings("nats://nowhere.invalid:4222", "192.0.2.1")
    assert side_channel.resolve(named) is named


@pytest.mark.parametrize(
    "url",
    ["nats://127.0.0.1:4222", "tls://user:word@127.0.0.1", "127.0.0.1:4222, nats://192.0.2.1:4222"],
)
def test_beside_a_broker_on_loopback_it_is_loopback(url: str) -> None:
    assert side_channel.resolve(settings(url)).nixl.host == "127.0.0.1"


def test_it_is_the_address_from_which_this_machine_reaches_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def lookup(host: str, port: int, **more: object) -> list[tuple[object, ...]]:
        asked.append((host, port))
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.2", port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert side_channel.resolve(settings("nats://nats")).nixl.host == "127.0.0.1"
    assert asked == [("nats", side_channel.DEFAULT_PORT)]


def test_it_waits_for_a_broker_whose_name_nothing_knows_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([None, None, "10.0.0.7"])
    monkeypatch.setattr(side_channel, "_own_address", lambda host, port: next(answers))
    monkeypatch.setattr(side_channel, "RETRY_S", 0.0)
    assert side_channel.resolve(settings("nats://nats:4222")).nixl.host == "10.0.0.7"


@pytest.mark.parametrize("url", ["nats://", "nats://:4222", "nats://[::1", "nats://host:port"])
def test_a_broker_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"nixl\.host is auto"):
        side_channel.resolve(settings(url))


@pytest.mark.parametrize(("role", "host"), [(Role.PREFILL, "127.0.0.1"), (Role.RENDER, "auto")])
def test_a_worker_that_moves_kv_has_a_real_address(
    role: Role, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def run(given: Settings, **more: object) -> None:
        seen.append(given.nixl.host)

    monkeypatch.setattr(serve, "load", lambda role: run)
    fake = msgspec.structs.replace(Settings().up, engine="fake")
    given = msgspec.structs.replace(settings("nats://127.0.0.1:4222"), up=fake)
    assert serve.serve(role, given) == 0
    assert seen == [host]
