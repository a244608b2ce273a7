"""Input and output of a batch at a URL, at a real HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.cli.batch import transfer as transfer_module
from headrace.cli.batch.run import Batch, Session
from headrace.cli.batch.transfer import Transfer, TransferError, place, shown


class Server(ThreadingHTTPServer):
    """Gives what it has, takes what is put, and fails as often as a test says."""

    content = b"one\ntwo\n"
    num_failures = 0
    status = 503

    def __init__(self) -> None:
        self.put: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/in.jsonl")
            self.end_headers()
        else:
            self.answer(self.server.content)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.headers = {name.lower(): value for name, value in self.headers.items()}
        if self.server.num_failures == 0:
            self.server.put[self.path] = body
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        if self.server.num_failures:
            self.server.num_failures -= 1
            self.send_response(self.server.status)
            body = b""
        else:
            self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(transfer_module, "RETRY_DELAYS_S", (0.0, 0.0))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_is_at_a_url_is_here_while_the_batch_runs_and_gone_when_it_is_delivered(
    server: Server,
) -> None:
    transfer = Transfer.of(f"{server.url}/moved", f"{server.url}/out?sign=1")
    transfer.fetch()
    assert transfer.input_file.read_bytes() == server.content
    transfer.output_file.write_bytes(b"done\n")
    transfer.deliver()
    assert server.put == {"/out?sign=1": b"done\n"}
    assert "transfer-encoding" not in server.headers
    assert transfer.folder is not None
    assert not transfer.folder.exists()


def test_a_newly_signed_url_goes_on_with_what_is_here() -> None:
    first = Transfer.of("https://store/in?sign=1", "https://store/out?sign=1")
    again = Transfer.of("https://store/in?sign=2", "https://store/out?sign=2")
    assert first.output_file == again.output_file
    assert first.output_file != Transfer.of("https://store/in", "https://store/x").output_file


def test_files_of_this_machine_stay_where_they_are(tmp_path: Path) -> None:
    transfer = Transfer.of(place("in.jsonl"), place(str(tmp_path / "out.jsonl")))
    assert (transfer.input_file, transfer.output_file) == (
        Path("in.jsonl"),
        tmp_path / "out.jsonl",
    )
    assert transfer.folder is None
    transfer.fetch()
    transfer.deliver()


def test_a_servers_passing_trouble_is_waited_for_and_the_rest_is_said(server: Server) -> None:
    server.num_failures = 2
    transfer = Transfer.of(f"{server.url}/in", f"{server.url}/out?key=secret")
    transfer.fetch()
    transfer.output_file.write_bytes(b"done\n")
    server.num_failures, server.status = 1, 403
    with pytest.raises(TransferError, match="HTTP 403") as caught:
        transfer.deliver()
    assert "secret" not in str(caught.value)
    assert transfer.output_file.read_bytes() == b"done\n"  # the next try has it
    transfer.deliver()
    assert server.put == {"/out?key=secret": b"done\n"}


def test_what_is_not_done_is_not_delivered(server: Server) -> None:
    transfer = Transfer.of(Path("in.jsonl"), f"{server.url}/out")
    transfer.fetch()
    transfer.output_file.write_bytes(b"half\n")
    batch = Batch(
        input_file=transfer.input_file,
        output_file=transfer.output_file,
        tenant="default",
        transfer=transfer,
    )
    with_code = Session(batch, None, 0)  # type: ignore[arg-type]  # it has no part in this
    for code in (None, 130):
        with_code.code = code
        with_code.deliver()
    assert server.put == {}
    with_code.code = 1
    with_code.deliver()
    assert server.put == {"/out": b"half\n"}


def test_an_error_shows_a_url_without_what_signs_it() -> None:
    assert shown("https://me:pw@store/out?sign=1") == "https://store/out"
