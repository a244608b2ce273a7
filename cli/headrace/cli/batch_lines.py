"""The input of a batch: one request a line, as OpenAI's batch files and `vllm run-batch` have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from headrace.client import EndpointName
from headrace.shared.errors import BadRequestError, SettingsError

ENDPOINTS: dict[str, EndpointName] = {
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
    endpoint: EndpointName  #: from its URL
    model: str  #: whom it asks
    body: bytes  #: JSON, as it stands in the line

    @property
    def digest(self) -> str:
        """Tells this request from any other one of the same `custom_id`."""
        return _digest(self.endpoint.encode(), self.body)


class LineError(BadRequestError):
    """A line that is no request; `custom_id` is empty where the line has none of its own."""

    def __init__(self, message: str, *, param: str | None = None, custom_id: str = "") -> None:
        super().__init__(message[:MAX_MESSAGE], param=param)
        self.custom_id = custom_id


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, with one of them in memory at a time. Raises: SettingsError."""
    end = 0
    try:
        with path.open("rb") as file:
            number = 0
            while part := file.readline(MAX_LINE_BYTES):
                number += 1
                end += len(part)
                raw = part
                while len(part) == MAX_LINE_BYTES and not part.endswith(b"\n"):
                    raw = b""
                    part = file.readline(MAX_LINE_BYTES)
                    end += len(part)
                is_too_long = not raw
                raw = (raw.removeprefix(BOM) if number == 1 else raw).strip()
                if raw or is_too_long:
                    yield Line(number=number, end=end, raw=raw)
    except OSError as error:
        raise SettingsError(f"--input-file {path}: {error.strerror or error}") from None


class Parser:
    """Makes requests of lines; remembers every `custom_id`, since each may stand in one line only."""

    def __init__(self, default_model: str | None) -> None:
        """`default_model` is that of the bodies that name none; None: each must name one."""
        self._default_model = default_model
        self._lines: dict[str, int] = {}  # custom_id → the number of its line

    def parse(self, line: Line) -> Request:
        """Return the request of a line. Raises: LineError that says what is wrong and what would be right."""
        if not line.raw:
            raise LineError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
        try:
            found = _lines.decode(line.raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(f"not a JSON object: {error}") from None
        custom_id = self._custom_id(found, line.number)
        try:
            return self._request(found, custom_id)
        except LineError as error:
            error.custom_id = custom_id
            raise

    def _custom_id(self, found: _Line, number: int) -> str:
        custom_id = found.custom_id
        if not isinstance(custom_id, str) or not custom_id:
            raise LineError("custom_id must be a string that is not empty", param="custom_id")
        first = self._lines.setdefault(custom_id, number)
        if first != number:
            raise LineError(f"custom_id {custom_id!r} stands in line {first}", param="custom_id")
        return custom_id

    def _request(self, found: _Line, custom_id: str) -> Request:
        if found.method != "POST":
            raise LineError(f"method must be 'POST', got {found.method!r}", param="method")
        endpoint = ENDPOINTS.get(found.url) if isinstance(found.url, str) else None
        if endpoint is None:
            known = ", ".join(ENDPOINTS)
            raise LineError(f"url must be one of {known}, got {found.url!r}", param="url")
        body = bytes(found.body)
        try:
            fields = _bodies.decode(body or b"null")
            if not fields.model and self._default_model:
                fields.model = self._default_model
                body = msgspec.json.encode({**msgspec.json.decode(body), "model": fields.model})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(f"body: {error}", param="body") from None
        if fields.stream:
            raise LineError("Request must not be sent in stream mode", param="stream")
        if not fields.model:
            raise LineError("body.model must be a served model name", param="model")
        return Request(custom_id=custom_id, endpoint=endpoint, model=fields.model, body=body)


def _digest(*parts: bytes) -> str:
    return blake2b(b"\0".join(parts), digest_size=DIGEST_BYTES).hexdigest()
