"""Which addresses are public, whatever they are wrapped in."""

from __future__ import annotations

import ipaddress

import pytest

from headrace.shared.errors import BadRequestError
from headrace.shared.webhooks.addresses import AddressError, check_url, is_public, resolve


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "2002:0a00:0001::",
        "64:ff9b::a00:1",
        "2001:0:4136:e378:8000:63bf:f5ff:fffe",
        "::10.0.0.1",
        "::ffff:0:10.0.0.1",
        "64:ff9b:1::a00:1",
        "fec0::1",
    ],
)
def test_an_address_of_a_machine_or_a_network_of_its_own_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "64:ff9b::101:101"])
def test_an_address_that_anybody_reaches_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
async def test_what_resolves_to_this_machine_is_refused_when_it_is_sent(host: str) -> None:
    with pytest.raises(AddressError, match="no public address"):
        await resolve(f"https://{host}/hook", allow_private=False)
    assert (await resolve(f"https://{host}/hook", allow_private=True)).port == 443


@pytest.mark.parametrize(
    "url",
    [
        "https://exam\nple.com/",
        "https://example.com/\t",
        "https://example.com /",
        "https://a.com/\x00",
    ],
)
def test_a_url_of_which_a_part_would_be_dropped_is_refused(url: str) -> None:
    with pytest.raises(BadRequestError, match="no control characters"):
        check_url(url, allow_private=True)
