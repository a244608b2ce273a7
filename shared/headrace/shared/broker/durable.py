"""Publishing with an ack: stored once, however often it had to be tried."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.shared.broker import stored
from headrace.shared.broker.connection import Connection, DeniedError, NoResponderError
from headrace.shared.errors import (
    BrokerError,
    HeadraceError,
    PayloadTooLargeError,
    QueueFullError,
)

RETRY_S = 0.2
ATTEMPT_TIMEOUT_S = 2.0  # of one try; the next one is deduplicated by its message ID

MESSAGE_ID_HEADER = "Nats-Msg-Id"
_EXPECT_LAST = "Nats-Expected-Last-Subject-Sequence"
_NONCE = "Hr-Nonce"

_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
_STORE_FAILED = 10077  # the stream or the subject is full
_NO_RESOURCES = frozenset({10023, 10047, 10028})  # memory, storage, account limit
_TOO_LARGE = frozenset({10054, 10097})


class DurablePublisher:
    """Publishes into streams over one connection."""

    def __init__(
        self,
        connection: Connection,
        wait_until_ready: Callable[[float], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._connection = connection
        self._wait_until_ready = wait_until_ready
        self._timeout_s = timeout_s

    async def publish(
        self,
        stream: str,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str],
        *,
        expect_last: int | None,
    ) -> int | None:
        """Store one message; `headers` carry its ID. Raises as `Broker.publish_durable`.

        Returns its stream sequence, or None where that returns False.
        """
        nonce = uuid.uuid4().hex
        all_headers = {**headers, _NONCE: nonce}
        if expect_last is not None:
            all_headers[_EXPECT_LAST] = str(expect_last)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        maybe_stored = False  # an earlier try went unanswered
        while True:
            try:
                await self._wait_until_ready(deadline - loop.time())
                message = await self._connection.request(
                    subject,
                    payload,
                    timeout_s=max(0.001, min(ATTEMPT_TIMEOUT_S, deadline - loop.time())),
                    headers=all_headers,
                )
                break
            except DeniedError:
                raise
            except BrokerError as error:
                if self._connection.is_closed or loop.time() + RETRY_S >= deadline:
                    raise BrokerError(
                        f"{subject}: no publish ack within {self._timeout_s:g} s "
                        f"(broker.publish_timeout_s): {error}"
                    ) from error
                maybe_stored = maybe_stored or not isinstance(error, NoResponderError)
                await asyncio.sleep(RETRY_S)
        ack: dict[str, Any] = msgspec.json.decode(message.data)
        if "error" not in ack and not ack.get("duplicate"):
            return int(ack["seq"])
        if "error" in ack and not _says_taken(ack["error"], expect_last):
            raise _publish_error(subject, ack["error"])
        if not maybe_stored:
            return None
        sequence: int = ack.get("seq") or 0
        is_of_same_id = sequence > 0
        found: Msg | None = None
        with contextlib.suppress(DeniedError):
            if is_of_same_id:
                found = await stored.read_sequence(self._connection, stream, sequence)
            else:
                found = await stored.read_last(self._connection, stream, subject)
        if found is None:
            # Its ID is known, and it is worked off already, or not ours to read. A try of this call went
            # unanswered: it was that one.
            return sequence if is_of_same_id else None
        found_headers = found.headers or {}
        return int(found_headers[stored.SEQUENCE]) if found_headers.get(_NONCE) == nonce else None


def _says_taken(error: Mapping[str, Any], expect_last: int | None) -> bool:
    if expect_last is None:
        return False
    if error.get("err_code") in _WRONG_LAST_SEQUENCE:
        return True
    return error.get("err_code") == _STORE_FAILED and "per subject" in error.get("description", "")


def _publish_error(subject: str, error: Mapping[str, Any]) -> HeadraceError:
    err_code, description = error.get("err_code"), error.get("description", "")
    if err_code == _STORE_FAILED and "per subject" in description:
        return QueueFullError(
            f"{subject}: the queue is full ({description}; broker.max_queued_per_subject); try again later"
        )
    if err_code == _STORE_FAILED or err_code in _NO_RESOURCES:
        return QueueFullError(f"{subject}: the broker's store is full ({description})")
    if err_code in _TOO_LARGE:
        return PayloadTooLargeError(f"{subject}: {description}")
    return BrokerError(f"{subject}: the broker refused the message: {description} ({err_code})")
