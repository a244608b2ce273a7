"""One signed request to one webhook endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime

import httpx
from standardwebhooks import Webhook

from headrace.shared.webhooks.addresses import AddressError, resolve
from headrace.shared.webhooks.endpoints import Attempt

USER_AGENT = "headrace-webhooks"
MAX_ERROR_CHARS = 256


class Sender:
    """Sends webhooks; follows no redirect and uses no proxy, so that only checked addresses are reached."""

    def __init__(self, *, allow_private: bool, timeout_s: float) -> None:
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        # No connection is kept: one to an address may have been made, and its certificate checked, for another
        # host with the same address.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            follow_redirects=False, trust_env=False, timeout=timeout_s, limits=limits
        )

    async def send(self, url: str, secrets: Iterable[str], webhook_id: str, body: bytes) -> Attempt:
        """Send once, and return how it went; never raises for what the receiver or the network does."""
        at, started = time.time(), time.monotonic()
        status_code, error = None, None
        try:
            async with asyncio.timeout(self._timeout_s):
                headers = signed(secrets, webhook_id, body, at=at)
                status_code = await self._post(url, headers, body)
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except AddressError as refused:
            error = str(refused)
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            # It may quote what the receiver sent, at any length; each attempt stays in a record.
            error = f"{type(failure).__name__}: {failure}"[:MAX_ERROR_CHARS]
        seconds = time.monotonic() - started
        return Attempt(at=at, seconds=round(seconds, 6), status_code=status_code, error=error)

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> int:
        target = await resolve(url, allow_private=self._allow_private)
        parsed = httpx.URL(url)
        # The name is not asked again: what it resolved to was checked, and is where this goes.
        async with self._client.stream(
            "POST",
            parsed.copy_with(host=target.address),
            content=body,
            headers={"host": parsed.netloc.decode("ascii"), **headers},
            extensions={"sni_hostname": target.host},
        ) as response:
            return response.status_code  # what else it says is nobody's business

    async def close(self) -> None:
        """Close what is open."""
        await self._client.aclose()


def signed(secrets: Iterable[str], webhook_id: str, body: bytes, *, at: float) -> dict[str, str]:
    """Return the headers that prove who sends `body`, signed at `at` (Unix seconds) with every secret."""
    moment = datetime.fromtimestamp(int(at), UTC)
    signatures = [Webhook(secret).sign(webhook_id, moment, body.decode()) for secret in secrets]
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(at)),
        "webhook-signature": " ".join(signatures),
    }
