"""Turns `nixl.host = "auto"` into the address of this machine, or container, that other workers reach.

A worker and those that pull from it share a broker: the address from which this machine reaches the broker is one on
their network. In a container that is the container's own; beside a broker on loopback it is loopback.
"""

from __future__ import annotations

import logging
import socket
import time
from urllib.parse import urlsplit

import msgspec

from headrace.shared.errors import SettingsError
from headrace.shared.settings import Settings

logger = logging.getLogger(__name__)

AUTO = "auto"
RETRY_S = 1.0
DEFAULT_PORT = 4222


def resolve(settings: Settings) -> Settings:
    """Return the settings with an address for `nixl.host`; wait while nothing knows the broker's name.

    Raises: SettingsError for a broker's address that is none.
    """
    if settings.nixl.host != AUTO:
        return settings
    host, port = _first_server(settings.broker.url)
    is_told = False
    while (found := _own_address(host, port)) is None:
        if not is_told:
            logger.warning(
                "nixl.host is auto, and the broker's host %s has no address yet",
                host,
                extra={"action": "side_channel_waits"},
            )
            is_told = True
        time.sleep(RETRY_S)
    logger.info(
        "other workers reach this one at %s",
        found,
        extra={"action": "side_channel_resolved", "host": found},
    )
    return msgspec.structs.replace(
        settings, nixl=msgspec.structs.replace(settings.nixl, host=found)
    )


def _first_server(url: str) -> tuple[str, int]:
    first = url.split(",")[0].strip()
    try:
        parts = urlsplit(first if "//" in first else f"nats://{first}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise SettingsError("nixl.host is auto, and broker.url names no host")
    return host, port or DEFAULT_PORT


def _own_address(host: str, port: int) -> str | None:
    """Return the address from which this machine would send to `host`. None: it has no address, or no way there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: looks up the way, and sends nothing
            own: str = probe.getsockname()[0]
            return own
    except OSError:
        return None
