"""`headrace bench`: one load against one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.cli.bench import load
from headrace.cli.bench.call import Caller
from headrace.cli.bench.measures import Measured, summary
from headrace.cli.bench.prompts import Ask
from headrace.shared.errors import HeadraceError

TIMEOUT_S = 600.0  # without a byte


class BenchError(HeadraceError):
    """The server can't be measured; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent, and when."""

    asks: list[Ask]
    rate: float = float("inf")  #: conversations begun a second; random times
    concurrency: int = 0  #: 0: as `rate` says; else so many at once, each followed by another
    seed: int = 0  #: of the times
    warmup: Sequence[Ask] = ()  #: conversations held before, one by one, and not counted
    limits_ms: dict[str, float] = field(default_factory=dict)  #: of goodput
    extra: dict[str, Any] = field(default_factory=dict)  #: into each request's body


async def measure(
    base_url: str, load_: Load, *, model: str = "", api_key: str = ""
) -> dict[str, Any]:
    """Send a load, and return its summary. Raises: BenchError where the server does not answer at all."""
    served, measured = await send(base_url, load_, model=model, api_key=api_key)
    return {"model": served, **summary(measured, load_.limits_ms)}


async def send(
    base_url: str, load_: Load, *, model: str = "", api_key: str = ""
) -> tuple[str, list[Measured]]:
    """Send a load, and return the model that answered and what was measured of each request.

    Raises: BenchError where the server does not answer at all.
    """
    async with calling(base_url, model=model, api_key=api_key, extra=load_.extra) as caller:
        for ask in load_.warmup:
            await caller.ask(ask)
        if load_.concurrency:
            held = await load.closed_loop(load_.asks, load_.concurrency, caller.ask)
        else:
            times = load.arrivals(len(load_.asks), load_.rate, load_.seed)
            held = await load.open_loop(load_.asks, times, caller.ask)
    return caller.model, [one for turns in held for one in turns]


@asynccontextmanager
async def calling(
    base_url: str, *, model: str = "", api_key: str = "", extra: dict[str, Any] | None = None
) -> AsyncIterator[Caller]:
    """Give what asks a server, for `model` or the first that it names. Raises: BenchError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=TIMEOUT_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        try:
            served = model or (await client.get("/v1/models")).json()["data"][0]["id"]
            is_headrace = (await client.get("/workers")).status_code == httpx.codes.OK
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise BenchError(f"{base_url} tells no model: {error!r}") from error
        yield Caller(client, served, reads_records=is_headrace, extra=extra or {})


def run(base_url: str, load_: Load, *, model: str = "", api_key: str = "") -> dict[str, Any]:
    """Do `measure` in an event loop of its own."""
    return asyncio.run(measure(base_url, load_, model=model, api_key=api_key))
