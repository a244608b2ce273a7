"""The webhook endpoints of tenants: made, changed, tried, deleted. Knows nothing of HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.gateway.errors import MAX_SHOWN_ID, NotFoundError
from headrace.gateway.link import Link
from headrace.shared.errors import BadRequestError, ConflictError
from headrace.shared.events import Event, Kind, event
from headrace.shared.records import Page, Records, new_id
from headrace.shared.settings import WebhookSettings
from headrace.shared.webhooks.addresses import check_url
from headrace.shared.webhooks.endpoints import (
    EVENT_TYPES,
    MAX_ENDPOINTS,
    OLD_SECRET_S,
    Attempt,
    Endpoint,
    Sending,
    body_of,
    new_secret,
    webhook_id_of,
)
from headrace.shared.webhooks.sender import Sender

MAX_NAME = 256
MAX_URL = 2_048
MAX_SENDINGS = 100
_KINDS: dict[str, Kind] = {"batch": "batch", "response": "response"}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants an endpoint to be; None: as it is."""

    url: str | None = None
    """Where its webhooks go."""
    name: str | None = None
    """The client's own word for it."""
    event_types: tuple[str, ...] | None = None
    """Which events it hears of."""


class WebhookEndpoints:
    """The endpoints of every tenant, each seen by its own alone. Every method raises BrokerError without a broker."""

    def __init__(
        self, link: Link, settings: WebhookSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._link = link
        self._settings = settings
        self._clock = clock

    @property
    def _records(self) -> Records:
        return Records(self._link.broker)

    async def create(self, tenant: str, wanted: Change) -> Endpoint:
        """Make an endpoint. Raises: BadRequestError saying what is wrong or missing."""
        for name in ("url", "event_types"):
            if msgspec.structs.asdict(wanted)[name] is None:
                raise BadRequestError(f"{name} is missing", param=name)
        self._check(wanted)
        page = await self._records.list("hook", tenant, Endpoint, limit=MAX_ENDPOINTS)
        if len(page.records) >= MAX_ENDPOINTS:
            raise BadRequestError(f"there are {MAX_ENDPOINTS} endpoints already: delete one first")
        now = int(self._clock())
        endpoint = Endpoint(
            id=new_id("we_"),
            name=wanted.name or "",
            url=wanted.url or "",
            event_types=tuple(dict.fromkeys(wanted.event_types or ())),
            secret=new_secret(),
            created_at=now,
            updated_at=now,
        )
        await self._records.put("hook", tenant, endpoint.id, endpoint, expect=0)
        return endpoint

    async def get(self, tenant: str, endpoint_id: str) -> Endpoint:
        """Return an endpoint. Raises: NotFoundError."""
        return (await self._found(tenant, endpoint_id))[0]

    async def list(self, tenant: str, *, after: str | None, limit: int) -> Page[Endpoint]:
        """Return a tenant's endpoints, the newest first."""
        return await self._records.list("hook", tenant, Endpoint, after=after, limit=limit)

    async def update(self, tenant: str, endpoint_id: str, wanted: Change) -> Endpoint:
        """Change an endpoint; one that was disabled is sent to again. Raises: NotFoundError, BadRequestError."""
        self._check(wanted)
        asked = msgspec.structs.asdict(wanted)
        changes = {name: value for name, value in asked.items() if value is not None}
        if wanted.event_types is not None:
            changes["event_types"] = tuple(dict.fromkeys(wanted.event_types))
        return await self._change(tenant, endpoint_id, disabled=None, **changes)

    async def rotate_secret(self, tenant: str, endpoint_id: str, *, keep_old: bool) -> Endpoint:
        """Replace the secret; `keep_old`: what it was signs for another day as well. Raises: NotFoundError."""
        old = (await self.get(tenant, endpoint_id)).secret if keep_old else None
        until = int(self._clock()) + OLD_SECRET_S if keep_old else 0
        return await self._change(
            tenant, endpoint_id, secret=new_secret(), old_secret=old, old_secret_until=until
        )

    async def delete(self, tenant: str, endpoint_id: str) -> None:
        """Delete an endpoint; nothing more is sent to it. Raises: NotFoundError."""
        await self.get(tenant, endpoint_id)
        await self._records.delete("hook", tenant, endpoint_id, expect=None)

    async def sendings(self, tenant: str, endpoint_id: str) -> Sequence[Sending]:
        """Return what was sent to an endpoint lately, or is to be, the newest first. Raises: NotFoundError."""
        await self.get(tenant, endpoint_id)
        page = await self._records.list(
            "hooklog",
            tenant,
            Sending,
            limit=10 * MAX_SENDINGS,
            where=lambda sending: sending.endpoint_id == endpoint_id,
        )
        found = sorted((record.value for record in page.records), key=lambda s: -s.created_at)
        return found[:MAX_SENDINGS]

    async def test(self, tenant: str, endpoint_id: str, event_type: str) -> Attempt:
        """Send one sample, now and never again. Raises: NotFoundError, BadRequestError when there is no answer."""
        endpoint = await self.get(tenant, endpoint_id)
        _check_types((event_type,))
        sample, sender = _sample(tenant, event_type, at=self._clock()), self._sender()
        try:
            attempt = await sender.send(
                endpoint.url,
                endpoint.secrets(self._clock()),
                webhook_id_of(sample),
                body_of(sample),
            )
        finally:
            await sender.close()
        if attempt.status_code is None:
            raise BadRequestError(f"{endpoint.id} did not answer: {attempt.error}")
        return attempt

    def _sender(self) -> Sender:
        settings = self._settings
        return Sender(allow_private=settings.allow_private, timeout_s=settings.timeout_s)

    async def _change(self, tenant: str, endpoint_id: str, **changes: Any) -> Endpoint:
        while True:
            found, revision = await self._found(tenant, endpoint_id)
            now = int(self._clock())
            endpoint = msgspec.structs.replace(found, updated_at=now, **changes)
            try:
                await self._records.put("hook", tenant, endpoint_id, endpoint, expect=revision)
            except ConflictError:
                continue
            return endpoint

    async def _found(self, tenant: str, endpoint_id: str) -> tuple[Endpoint, int]:
        found = await self._records.find("hook", tenant, endpoint_id, Endpoint)
        if found is None:
            raise NotFoundError(
                f"No such webhook endpoint: {endpoint_id[:MAX_SHOWN_ID]}", param="id"
            )
        return found

    def _check(self, wanted: Change) -> None:
        if wanted.url is not None:
            if len(wanted.url) > MAX_URL:
                raise BadRequestError(
                    f"url may have {MAX_URL:,} characters, got {len(wanted.url):,}", param="url"
                )
            check_url(wanted.url, allow_private=self._settings.allow_private)
        if wanted.name is not None and len(wanted.name) > MAX_NAME:
            raise BadRequestError(
                f"name may have {MAX_NAME} characters, got {len(wanted.name):,}", param="name"
            )
        if wanted.event_types is not None:
            _check_types(wanted.event_types)


def _check_types(event_types: tuple[str, ...]) -> None:
    wrong = [name for name in event_types if name not in EVENT_TYPES]
    if wrong or not event_types:
        got = f", got {wrong[0][:64]!r}" if wrong else ""
        raise BadRequestError(
            f"event_types must be of {', '.join(EVENT_TYPES)}{got}", param="event_types"
        )


def _sample(tenant: str, event_type: str, *, at: float) -> Event:
    kind, _, change = event_type.partition(".")
    return event(tenant, _KINDS[kind], change, new_id(f"{kind}_test_"), {}, at=at)
