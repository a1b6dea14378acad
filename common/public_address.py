"""Which addresses are of the Internet at large: a name must not lead an agent into the node's own networks."""

from __future__ import annotations

import ipaddress

_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # looks public; Azure answers there, in each machine's own network
            "192.0.0.0/24",  # not private to every version of `ipaddress`; a metadata service of another cloud
            "::/96",  # IPv4 in an old spelling
            "fec0::/10",
            "64:ff9b:1::/48",  # IPv6 that a gateway of the node's own makes IPv4 of
        ),
    )
)
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "::ffff:0:0:0/96")))
"""IPv6 that a gateway, or the machine, makes IPv4 of: the last 32 bits."""


def is_public(text: str) -> bool:
    """Whether packets to the address leave the node's own networks, as far as its number says."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if any(address in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)
