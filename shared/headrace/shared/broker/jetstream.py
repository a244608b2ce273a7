"""Calls of JetStream's own API, with its errors turned into ours."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.shared.broker.connection import Connection
from headrace.shared.errors import BrokerError

API_TIMEOUT_S = 5.0

CONSUMER_NOT_FOUND = 10014
STREAM_NAME_IN_USE = 10058
STREAM_NOT_FOUND = 10059


class ApiError(BrokerError):
    """The broker's JetStream API said no; `err_code` is its own number for why."""

    def __init__(self, message: str, *, err_code: int) -> None:
        super().__init__(message)
        self.err_code = err_code


async def api(
    connection: Connection, name: str, body: Any = None, *, timeout_s: float = API_TIMEOUT_S
) -> dict[str, Any]:
    """Call `$JS.API.<name>`. Raises: ApiError, or BrokerError when there is no answer."""
    message = await connection.request(
        f"$JS.API.{name}",
        b"" if body is None else msgspec.json.encode(body),
        timeout_s=timeout_s,
    )
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    if error := answer.get("error"):
        raise ApiError(
            f"{name}: {error.get('description')}", err_code=int(error.get("err_code", 0))
        )
    return answer
