"""TLS to a broker with the deployment's configuration: both sides are checked, or nothing is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from headrace.shared.broker import Broker
from headrace.shared.errors import BrokerError, SettingsError
from headrace.shared.nats_server import NatsServer
from headrace.shared.settings import BrokerSettings
from headrace.shared.subjects import Lane, Role, req

from ...conftest import Serve
from . import deployed

Start = Callable[..., "asyncio.Future[NatsServer]"]
PASSWORD = "pw-gateway"
INFO = b'INFO {"server_id":"x","version":"2.15.1","max_payload":1000000,"headers":true}\r\n'


class Papers:
    """Certificates of one authority, as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str) -> tuple[str, str]:
        """Return the files of a new certificate and its key."""
        made = self._authority.issue_cert(*names)
        cert, key = self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key"
        made.private_key_pem.write_to_path(key)
        for pem in made.cert_chain_pems:
            pem.write_to_path(cert, append=True)
        return str(cert), str(key)


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path / "papers")


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Start:
    """Start a server that shows a certificate for a name, and asks for one."""

    async def start(papers: Papers, name: str) -> NatsServer:
        cert, key = papers.issue(name)
        env = {
            "HEADRACE_NATS_CERT": cert,
            "HEADRACE_NATS_KEY": key,
            "HEADRACE_NATS_CA": papers.ca,
        }
        text = deployed.turned_on(deployed.CONFIG.read_text(), "tls")
        return await serve(deployed.server(tmp_path, text, env))

    return start


async def connect(url: str, **settings: str) -> Broker:
    given = BrokerSettings(url=url, password=PASSWORD, **settings)
    return await asyncio.wait_for(Broker.connect(given, role=Role.GATEWAY, name="1"), 60)


async def test_both_sides_are_checked_and_then_it_works(papers: Papers, start: Start) -> None:
    server = await start(papers, "127.0.0.1")
    cert, key = papers.issue("gateway")
    broker = await connect(server.url, tls_ca=papers.ca, tls_cert=cert, tls_key=key)
    assert await broker.publish_durable(req("acme", "m", Lane.RT), b"{}", message_id="r1")
    await broker.close()


@pytest.mark.parametrize("name", ["broker.example", "127.0.0.2"])
async def test_a_certificate_of_another_name_is_not_trusted(
    papers: Papers, start: Start, name: str
) -> None:
    server = await start(papers, name)
    with pytest.raises(BrokerError, match="is not trusted: its certificate is not good"):
        await connect(server.url, tls_ca=papers.ca)


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_certificate_of_another_authority_is_not_trusted(
    papers: Papers, start: Start, tmp_path: Path, scheme: str
) -> None:
    server = await start(papers, "127.0.0.1")
    others = "" if scheme == "tls" else Papers(tmp_path / "others").ca
    with pytest.raises(BrokerError, match="is not trusted: its certificate is not good"):
        await connect(server.url.replace("nats", scheme), tls_ca=others)


@pytest.mark.parametrize(("scheme", "with_ca"), [("nats", True), ("tls", False)])
async def test_a_broker_without_tls_is_told_no_password(
    papers: Papers, scheme: str, with_ca: bool
) -> None:
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        while part := await reader.read(1_000):
            heard.extend(part)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        with pytest.raises(BrokerError, match="is not trusted: the broker offers no TLS"):
            await connect(f"{scheme}://127.0.0.1:{port}", tls_ca=papers.ca if with_ca else "")
    assert heard == b""


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tls_ca": "/nowhere/ca.pem"}, "broker.tls_ca /nowhere/ca.pem: No such file"),
        ({"tls_cert": "/nowhere/c.pem"}, "broker.tls_key go together"),
        ({"tls_cert": "/nowhere/c.pem", "tls_key": "/nowhere/k"}, "broker.tls_cert /nowhere/c.pem"),
    ],
)
async def test_files_that_are_not_there_are_named(settings: dict[str, str], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        await connect("nats://127.0.0.1:1", **settings)


async def test_a_client_that_shows_nothing_gets_nowhere(papers: Papers, start: Start) -> None:
    server = await start(papers, "127.0.0.1")
    turned_away = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.__dict__.get("action") == "broker_unreachable":
                turned_away.set()

    logger = logging.getLogger("headrace.shared.broker")
    logger.addHandler(watch := Watch())
    connecting = asyncio.create_task(connect(server.url, tls_ca=papers.ca))
    await asyncio.wait_for(turned_away.wait(), 60)
    assert not connecting.done()
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    logger.removeHandler(watch)
