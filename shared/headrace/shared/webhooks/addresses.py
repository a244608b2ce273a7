"""Which addresses a webhook may be sent to: public ones alone, whatever a name resolves to when it is sent."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

from headrace.shared.errors import BadRequestError, HeadraceError

ALLOW = "webhooks.allow_private"
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that is given out. What lies beside it has other meanings, of which `is_global` knows some."""
_DEFAULT_PORTS = {"https": 443, "http": 80}


class AddressError(HeadraceError):
    """A webhook can't, or must not, be sent there; says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart, and the one address that its request goes to."""

    host: str
    port: int
    address: str


def check_url(url: str, *, allow_private: bool) -> tuple[str, int]:
    """Return host and port of an endpoint's URL. Raises: BadRequestError saying what would be right."""
    # urlsplit drops line breaks and tabs without a word: what was checked would not be what is asked.
    if not url.isprintable() or " " in url:
        raise BadRequestError("url must have no spaces and no control characters", param="url")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadRequestError(f"url: {error}", param="url") from None
    schemes = ("https", "http") if allow_private else ("https",)
    if parts.scheme not in schemes or not host or "@" in parts.netloc:
        raise BadRequestError(
            f"url must be {' or '.join(schemes)}://host/path, without user and password",
            param="url",
        )
    literal = _literal(host)
    if literal is not None and not (allow_private or is_public(literal)):
        raise BadRequestError(f"url: {host} is no public address ({ALLOW})", param="url")
    return host, port or _DEFAULT_PORTS[parts.scheme]


async def resolve(url: str, *, allow_private: bool) -> Target:
    """Return where a request to `url` goes.

    Raises: AddressError when the name resolves to nothing, or to an address that is not public.
    """
    try:
        host, port = check_url(url, allow_private=allow_private)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except BadRequestError as error:
        raise AddressError(error.message) from None
    except (OSError, UnicodeError) as error:
        raise AddressError(f"the host's name does not resolve: {error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        # One that is not is enough: whoever answers for the name may mix them.
        if not (allow_private or is_public(ipaddress.ip_address(address.partition("%")[0]))):
            raise AddressError(f"the host resolves to {address}, no public address ({ALLOW})")
    return Target(host, port, addresses[0])


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether anybody on the internet has the address; what an IPv6 address embeds counts as well."""
    if isinstance(address, IPv6Address):
        teredo = address.teredo
        embedded = address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
        if embedded is None and address in _NAT64:
            embedded = IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(embedded)
        if address not in _GLOBAL:
            return False
    return address.is_global and not address.is_multicast


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
