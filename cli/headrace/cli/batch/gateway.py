"""A gateway's files and batches, as the command line asks for them: OpenAI's API over HTTP, and nothing of NATS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec

from headrace.shared.errors import HeadraceError

TIMEOUT_S = 60.0  # without a byte
CONNECT_TRIES = 3
CHUNK_BYTES = 2**20
PASSING = frozenset({429, 500, 502, 503, 504})


class GatewayError(HeadraceError):
    """The gateway is not there, or says no; says why in the gateway's own words."""

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        """`is_passing`: the same call may fare better in a while."""
        super().__init__(message)
        self.is_passing = is_passing


class Gateway:
    """One gateway, as the owner of an API key sees it. Every method raises GatewayError."""

    def __init__(self, base_url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self._base_url,
            headers=headers,
            timeout=TIMEOUT_S,
            transport=httpx.HTTPTransport(retries=CONNECT_TRIES - 1),
        )

    def upload(self, path: Path) -> dict[str, Any]:
        """Send a file of requests, a part at a time; return OpenAI's object `file`."""
        with path.open("rb") as content:
            files = {"file": (path.name, content, "application/jsonl")}
            return self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=files)

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a batch; return OpenAI's object `batch`."""
        return self._ask("POST", "/v1/batches", json=dict(body))

    def batch(self, batch_id: str) -> dict[str, Any]:
        """Return what is known of a batch."""
        return self._ask("GET", f"/v1/batches/{_segment(batch_id)}")

    def batches(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest batches, the newest first."""
        found: list[dict[str, Any]] = self._ask("GET", "/v1/batches", params={"limit": limit})[
            "data"
        ]
        return found

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; what is done is kept."""
        return self._ask("POST", f"/v1/batches/{_segment(batch_id)}/cancel")

    def download(self, file_id: str, target: BinaryIO) -> int:
        """Write a file's content to `target`, a part at a time; return its size in bytes."""
        num_bytes = 0
        with (
            self._asked("GET", f"/v1/files/{_segment(file_id)}/content") as response,
            _errors_of(self._base_url),
        ):
            for part in response.iter_bytes(CHUNK_BYTES):
                num_bytes += target.write(part)
        return num_bytes

    def close(self) -> None:
        """Close what is open."""
        self._client.close()

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        with self._asked(method, path, **more) as response, _errors_of(self._base_url):
            try:
                found: dict[str, Any] = msgspec.json.decode(response.read(), type=dict[str, Any])
            except msgspec.DecodeError:
                raise GatewayError(f"{self._base_url}{path}: no gateway of headrace") from None
            return found

    @contextmanager
    def _asked(self, method: str, path: str, **more: Any) -> Iterator[httpx.Response]:
        with _errors_of(self._base_url):
            request = self._client.build_request(method, path, **more)
            response = self._client.send(request, stream=True)
        try:
            if response.status_code >= 400:
                with _errors_of(self._base_url):
                    reason = _reason(response.status_code, response.read())
                    raise GatewayError(reason, is_passing=response.status_code in PASSING)
            yield response
        finally:
            response.close()


@contextmanager
def _errors_of(base_url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"{base_url}: {str(error) or type(error).__name__}"
        raise GatewayError(reason, is_passing=isinstance(error, httpx.TransportError)) from None


def _reason(status: int, body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"HTTP {status}"


def _segment(text: str) -> str:
    """An ID from the command line must not become another path."""
    if not text or set(text) & set("/?#%") or text in (".", ".."):
        raise GatewayError(f"{text!r} is no ID")
    return text
