"""Which network an address belongs to: what one peer can be expected to hold whole.

A host with one address of a network often has all of it, so counting by address would be no bound: IPv6 tunnels and hosting
companies give a /48 to whoever asks, and a /24 is the smallest block of IPv4 that is routed by itself, as a /48 is of IPv6.
Narrower prefixes would let one rented block pass for hundreds of peers. Wider ones would join strangers, and these do already,
behind carrier-grade NAT. So a network is no quota anywhere: it only says who gives way first when there is no room.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import Final

from starlette.types import Scope

IPV4_PREFIX: Final = 24
IPV6_PREFIX: Final = 48


@functools.lru_cache(maxsize=4096)
def network_of(host: str | None) -> str:
    """Returns the /24 (IPv4, mapped addresses too) or /48 (IPv6) of an address; empty for a peer without one."""
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    prefix = IPV4_PREFIX if address.version == 4 else IPV6_PREFIX
    return str(ipaddress.ip_network((address, prefix), strict=False))


def client_network(scope: Scope) -> str:
    """Returns the network of whoever sent a request."""
    client = scope.get("client")
    return network_of(client[0] if client else None)
