"""`headrace health`: the exit code that a container's health check goes by."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.cli.main import main


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/ready": 200, "/moved": 302}.get(self.path, 503))
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_process_that_answers_200_is_well(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", f"{url}/ready"]) == 0
    assert capsys.readouterr().out == "200 OK\n"


@pytest.mark.parametrize("path", ["/draining", "/moved"])
def test_any_other_answer_is_not(url: str, path: str) -> None:
    assert main(["health", f"{url}{path}"]) == 1


def test_a_proxy_is_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert main(["health", f"{url}/ready"]) == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/ready", "no URL"])
def test_a_process_that_does_not_listen_is_not_well(url: str) -> None:
    assert main(["health", url]) == 1
