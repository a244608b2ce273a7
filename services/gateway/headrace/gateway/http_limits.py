"""Limits that uvicorn with httptools does not have: connections, and a request's head, its size and its time."""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.shared.messages import Failure
from headrace.shared.openai_errors import error_body

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers; a piece as the socket gives it may go beyond, once."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or from the first byte of a later request, until the headers are whole."""
FILES_BESIDE = 256
"""File descriptors of a process that are no client's: the broker's, logs, modules."""


def limited(max_connections: int) -> type[LimitedProtocol]:
    """Return the protocol of a server that holds so many connections, and let the process have as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return type("LimitedProtocol", (LimitedProtocol,), {"max_connections": max_connections})


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol; what goes beyond a limit is told which, and the connection closed."""

    max_connections = 0

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock of the first head."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self.max_connections:,} connections are open, as many as this gateway holds"
                " (setting gateway.max_connections); try again",
                "retry-after: 1\r\n",
            )
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head, and give it to the parser."""
        if self._in_head:
            self._head_bytes += len(data)
        if not self.transport.is_closing():
            super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"request line and headers have more than the limit of {MAX_HEAD_BYTES:,} bytes",
            )

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        if self._timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; what comes now is the body, which has limits of its own."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._head_bytes:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                f"request line and headers did not arrive within {HEAD_TIMEOUT_S:g} s",
            )
        elif not self.transport.is_closing():  # connected, and never asked anything
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str, header: str = "") -> None:
        if self.transport.is_closing():
            return
        body = error_body(
            Failure(code="http", message=message, http_status=status, error_type=status.phrase)
        )
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{header}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
