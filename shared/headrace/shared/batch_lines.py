"""The lines of a batch's input: one request each, as OpenAI's batch files and `vllm run-batch` have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.shared.errors import BadRequestError
from headrace.shared.messages import Endpoint

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}
MAX_LINE_BYTES = 64 * 2**20
MAX_MESSAGE = 500
DIGEST_BYTES = 6
BOM = b"\xef\xbb\xbf"


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


_lines = msgspec.json.Decoder(_Line)
_bodies = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the input that is not blank."""

    number: int  #: counts all lines of the file, from 1
    end: int  #: bytes of the file up to and with this line
    raw: bytes  #: without its end; empty: it is longer than `MAX_LINE_BYTES`

    @property
    def digest(self) -> str:
        """Tells this line from any other text at its place."""
        return _digest(self.raw)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a good line asks for."""

    custom_id: str  #: names it in the output
    endpoint: Endpoint  #: from its URL
    model: str  #: whom it asks
    body: bytes  #: JSON, as it stands in the line

    @property
    def digest(self) -> str:
        """Tells this request from any other one of the same `custom_id`."""
        return _digest(self.endpoint.encode(), self.body)


class LineError(BadRequestError):
    """A line that is no request; `custom_id` is empty where the line has none of its own.

    `reason` is a stable word for what is wrong.
    """

    def __init__(
        self, reason: str, message: str, *, param: str | None = None, custom_id: str = ""
    ) -> None:
        super().__init__(message[:MAX_MESSAGE], param=param)
        self.reason = reason
        self.custom_id = custom_id


class Splitter:
    """Makes lines of bytes as they come, with one line in memory at a time."""

    def __init__(self) -> None:
        self._number = 0
        self._end = 0
        self._held = bytearray()
        self._num_skipped = 0  # bytes of a line that is too long

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that are whole now."""
        start = 0
        while (newline := data.find(b"\n", start)) >= 0:
            yield from self._line(data[start : newline + 1])
            start = newline + 1
        self._hold(data[start:])

    def finish(self) -> Iterator[Line]:
        """Yield the last line, if no line end came behind it."""
        if self._held or self._num_skipped:
            yield from self._line(b"")

    def _hold(self, rest: bytes) -> None:
        self._held += rest
        if self._num_skipped or len(self._held) > MAX_LINE_BYTES:
            self._num_skipped += len(self._held)
            self._held.clear()

    def _line(self, last: bytes) -> Iterator[Line]:
        self._hold(last)
        is_too_long = self._num_skipped > 0
        self._number += 1
        self._end += self._num_skipped + len(self._held)
        raw = bytes(self._held)
        self._held.clear()
        self._num_skipped = 0
        raw = (raw.removeprefix(BOM) if self._number == 1 else raw).strip()
        if raw or is_too_long:
            yield Line(number=self._number, end=self._end, raw=raw)


class Parser:
    """Makes requests of lines; knows every `custom_id` again, since each may stand in one line only."""

    def __init__(self, default_model: str | None = None, *, url: str | None = None) -> None:
        """`default_model` is that of the bodies that name none; None: each must name one.

        `url`: the only one that a line may name; None: any of `ENDPOINTS`.
        """
        self._default_model = default_model
        self._urls = ENDPOINTS if url is None else {url: ENDPOINTS[url]}
        self._lines: dict[int, int] = {}  # hash of a custom_id → the number of its line

    def parse(self, line: Line) -> Request:
        """Return the request of a line. Raises: LineError that says what is wrong and what would be right."""
        if not line.raw:
            raise LineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES:,} bytes")
        try:
            found = _lines.decode(line.raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError("invalid_json_line", f"not a JSON object: {error}") from None
        custom_id = self._custom_id(found, line.number)
        try:
            return self._request(found, custom_id)
        except LineError as error:
            error.custom_id = custom_id
            raise

    def _custom_id(self, found: _Line, number: int) -> str:
        custom_id = found.custom_id
        if not isinstance(custom_id, str) or not custom_id:
            raise LineError(
                "invalid_custom_id",
                "custom_id must be a string that is not empty",
                param="custom_id",
            )
        first = self._lines.setdefault(_hash(custom_id), number)
        if first != number:
            raise LineError(
                "duplicate_custom_id",
                f"custom_id {custom_id!r} stands in line {first}",
                param="custom_id",
            )
        return custom_id

    def _request(self, found: _Line, custom_id: str) -> Request:
        if found.method != "POST":
            raise LineError(
                "invalid_method", f"method must be 'POST', got {found.method!r}", param="method"
            )
        endpoint = self._urls.get(found.url) if isinstance(found.url, str) else None
        if endpoint is None:
            known = ", ".join(self._urls)
            which = f"one of {known}" if len(self._urls) > 1 else known
            raise LineError("invalid_url", f"url must be {which}, got {found.url!r}", param="url")
        body = bytes(found.body)
        try:
            fields = _bodies.decode(body or b"null")
            if not fields.model and self._default_model:
                fields.model = self._default_model
                body = msgspec.json.encode({**msgspec.json.decode(body), "model": fields.model})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError("invalid_body", f"body: {error}", param="body") from None
        if fields.stream:
            raise LineError(
                "invalid_body", "Request must not be sent in stream mode", param="stream"
            )
        if not fields.model:
            raise LineError(
                "missing_model", "body.model must be a served model name", param="model"
            )
        return Request(custom_id=custom_id, endpoint=endpoint, model=fields.model, body=body)


def lines_of(data: Iterator[bytes]) -> Iterator[Line]:
    """Yield the lines of what comes in pieces."""
    splitter = Splitter()
    for piece in data:
        yield from splitter.feed(piece)
    yield from splitter.finish()


def _hash(custom_id: str) -> int:
    """As many IDs as a batch may have never share 64 bits, and need no memory for their text."""
    return int.from_bytes(blake2b(custom_id.encode("utf-8", "replace"), digest_size=8).digest())


def _digest(*parts: bytes) -> str:
    return blake2b(b"\0".join(parts), digest_size=DIGEST_BYTES).hexdigest()
