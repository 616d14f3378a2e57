"""The connections of one server, and which one is closed to admit a new one when it is full.

As in nginx, where a full worker closes idle connections rather than refusing new ones. The victim is the oldest connection that
waits for the rest of a request, in the network that has most of these. A request that has arrived whole is never given up. So
sockets that send nothing, or little by little, keep nobody out: each new one takes the place of another of its own kind.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import Final, Protocol

from starlette.types import Scope

# The network of an address: the range that one peer can be expected to control.
#
# A host with one address of a network often has all of it, so counting by address would be no bound: IPv6 tunnels and hosting
# companies give a /48 to whoever asks, and a /24 is the smallest block of IPv4 that is routed by itself, as a /48 is of IPv6.
# Narrower prefixes would let one rented block pass for hundreds of peers. Wider ones would join strangers, and these do
# already, behind carrier-grade NAT. So a network is no quota anywhere: it only says who gives way first when there is no
# room.


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


class Sheddable(Protocol):
    """A connection that can be closed at any moment."""

    def shed(self) -> None:
        """Closes it at once, without a word."""


class ConnectionTable:
    """Bounds connections, and knows which of them wait for a client.

    Args:
        limit: connections at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._networks: dict[Sheddable, str] = {}
        self._waiting: dict[str, dict[Sheddable, None]] = {}  # of each network the oldest first

    def enter(self, connection: Sheddable, host: str | None) -> bool:
        """Takes in a connection, which waits at first. False if there is no room: requests are in work on all others."""
        if len(self._networks) >= self._limit and not self._shed_one():
            return False
        self._networks[connection] = network_of(host)
        self.wait(connection)
        return True

    def wait(self, connection: Sheddable) -> None:
        """Notes that a connection has no whole request; one that waits already keeps its place in the order."""
        network = self._networks.get(connection)
        if network is not None:
            self._waiting.setdefault(network, {}).setdefault(connection)

    def work(self, connection: Sheddable) -> None:
        """Notes that a whole request has arrived, or that its reply has begun; the connection stays until `wait`."""
        network = self._networks.get(connection, "")
        waiting = self._waiting.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(network, None)

    def leave(self, connection: Sheddable) -> None:
        """Forgets a connection; one that is not there is no mistake."""
        self.work(connection)
        self._networks.pop(connection, None)

    def close(self) -> None:
        """Sheds all that are there."""
        for connection in list(self._networks):
            self.leave(connection)
            connection.shed()

    def _shed_one(self) -> bool:
        if not self._waiting:
            return False
        crowd = max(self._waiting, key=lambda network: len(self._waiting[network]))
        victim = next(iter(self._waiting[crowd]))
        self.leave(victim)
        victim.shed()
        return True
