"""The reader of many streams: `python benchmarks/fabric/load.py URL --streams N ...`; `run.py` starts it.

A process of its own, so that its CPU counts apart, and cheap, so that it is not what is measured: sockets without a
client library, and an event is known by its `data: `. As many streams as asked are open at any time: the next request
goes out on a connection as soon as its last answer has ended.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from window import RAMPS, Found, add_options, pin

EVENT = b"data: "
EVENT_END = b"\n\n"
DONE = b"data: [DONE]"
LAST_CHUNK = b"\r\n0\r\n\r\n"
READ_BYTES = 65_536


class AnswerError(Exception):
    """An answer that is not whole."""


class Stream:
    """The answer to one request, as it is read."""

    def __init__(self, asked: float) -> None:
        self._asked = asked
        self._last: float | None = None  # when an event came
        self._text = b""  # behind the last whole event
        self._is_done = False
        self.num_token_ids = 0

    def read(self, data: bytes, now: float, found: Found, since: float) -> bool:
        """Note what was read at `now`, if that is after `since`; return whether the answer is over.

        Raises: AnswerError when it is none.
        """
        text = self._text + data
        if self._last is None and not text.startswith(b"HTTP/1.1 200"[: len(text)]):
            raise AnswerError(text[:500].decode(errors="replace"))
        end = text.rfind(EVENT_END) + len(EVENT_END)
        if end >= len(EVENT_END):
            num = text.count(EVENT, 0, end)
            if DONE in text:
                self._is_done = True
                num -= 1
            if num:
                self._note(num, now, found, since)
            text = text[end:]
        self._text = text
        return self._is_done and text.endswith(LAST_CHUNK)

    def _note(self, num_token_ids: int, now: float, found: Found, since: float) -> None:
        self.num_token_ids += num_token_ids
        found.note(num_token_ids, now, asked=self._asked, last=self._last, since=since)
        self._last = now


class Connection:
    """One connection, with one request after the other."""

    def __init__(self, address: tuple[str, int], request: bytes, num_token_ids: int) -> None:
        """`num_token_ids`: of each answer, an event each."""
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._num_token_ids = num_token_ids
        self._ask()

    def read(self, found: Found, since: float) -> None:
        """Read what is there; ask again when the answer is over. Raises: AnswerError."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise AnswerError(f"the server hung up after {self._stream.num_token_ids} events")
        now = time.perf_counter()
        if not self._stream.read(data, now, found, since):
            return
        if self._stream.num_token_ids != self._num_token_ids:
            raise AnswerError(
                f"{self._stream.num_token_ids} events instead of {self._num_token_ids}"
            )
        found.num_answers += now >= since
        self._ask()

    def _ask(self) -> None:
        self._stream = Stream(time.perf_counter())
        self.socket.sendall(self._request)


def request_of(url: str, model: str, prompt_bytes: int, num_token_ids: int) -> bytes:
    """Return the bytes of one request."""
    body = json.dumps(
        {
            "model": model,
            "prompt": "x" * prompt_bytes,
            "max_tokens": num_token_ids,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_all(options: argparse.Namespace) -> dict[str, Any]:
    """Open the streams one after the other over `ramp_s`, then read for `window_s`; return what was found."""
    url = urlsplit(options.url)
    assert url.hostname is not None
    assert url.port is not None
    request = request_of(options.url, options.model, options.prompt_bytes, options.token_ids)
    connections: dict[int, Connection] = {}
    found = Found()
    started = time.perf_counter()
    begin = started + options.ramp_s * RAMPS
    end = begin + options.window_s
    cpu_s: float | None = None
    with select.epoll() as poll:
        while (now := time.perf_counter()) < end:
            if cpu_s is None and now >= begin:
                cpu_s = time.process_time()
                tell("begin")
            until = begin if now < begin else end
            if (num := len(connections)) < options.streams:
                if now >= started + num / options.streams * options.ramp_s:
                    made = Connection((url.hostname, url.port), request, options.token_ids)
                    connections[made.socket.fileno()] = made
                    poll.register(made.socket, select.EPOLLIN)
                until = min(until, started + (num + 1) / options.streams * options.ramp_s)
            for number, _ in poll.poll(max(0.0, until - now)):
                connections[number].read(found, begin)
        cpu_s = time.process_time() - (cpu_s or 0.0)
        tell("end")
    return found.result(window_s=time.perf_counter() - begin, cpu_s=cpu_s)


def tell(word: str) -> None:
    """Tell whoever started this."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """Read until the window is over; the lines `begin` and `end` tell when it is, the last one what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--model", default="fake")
    add_options(parser)
    options = parser.parse_args()
    pin(options.cpus)
    tell(json.dumps(read_all(options)))


if __name__ == "__main__":
    main()
