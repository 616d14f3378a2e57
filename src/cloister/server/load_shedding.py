"""Load shedding: which connection is closed, and which request body is dropped, when a server is full."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from starlette.types import Message, Receive, Scope

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

    As in nginx, where a full worker closes idle connections rather than refusing new ones. The victim is the oldest connection
    that waits for the rest of a request, in the network that has most of these. A request that has arrived whole is never given
    up. So sockets that send nothing, or little by little, keep nobody out: each new one takes the place of another of its own
    kind.

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


BODY_CEILING_BYTES: Final = 64 * 2**20
"""For bodies of all requests of one process at once."""
SMALL_BODY_BYTES: Final = 8 * 2**10
"""What a small body has at most; the smallest bucket, sealed twice with X-Wing and with its token, is shorter."""
SMALL_RESERVE_BYTES: Final = 8 * 2**20
"""Above the ceiling, for small bodies only."""


class BodyCharge:
    """What one body holds of a budget.

    Attributes:
        network: of who sends it.
        num_bytes: held now.
        is_whole: set by the reader with its last piece; once that is charged the body is not shed any more.
        is_shed: it gave way, and its reader has to let go of it.
        on_shed: called when it gives way.
    """

    def __init__(self, budget: BodyBudget, network: str) -> None:
        self._budget = budget
        self.network = network
        self.num_bytes = 0
        self.is_whole = False
        self.is_shed = False
        self.on_shed: Callable[[], None] = lambda: None

    def add(self, num_bytes: int) -> None:
        """Charges bytes that arrived; see `is_shed` afterwards."""
        self.num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        self._budget.make_room(self)

    def give_back(self, num_bytes: int) -> None:
        """Takes bytes back that were handed on; those of a body that gave way are back already."""
        num_bytes = min(num_bytes, self.num_bytes)
        self.num_bytes -= num_bytes
        self._budget.num_bytes -= num_bytes

    def close(self) -> None:
        """Gives everything back."""
        self.give_back(self.num_bytes)
        self._budget.forget(self)


class BodyBudget:
    """One memory ceiling for the request bodies of one process, charged as bytes arrive; what a head declares is not charged.

    At the ceiling the largest body that is still on its way gives way, in the network that holds most; bodies that are whole
    stay until their readers are done with them. A flood of large bodies therefore drops its own. Where whole bodies alone reach
    the ceiling, small ones still get in, up to a second bound.

    Args:
        limit_bytes: of all bodies together; at least as much as one may have.
        small_bytes: a body that has no more is small.
        reserve_bytes: above the limit, for small bodies only.

    Attributes:
        num_bytes: held by all bodies now; kept by their charges.
    """

    def __init__(
        self,
        limit_bytes: int = BODY_CEILING_BYTES,
        *,
        small_bytes: int = SMALL_BODY_BYTES,
        reserve_bytes: int = SMALL_RESERVE_BYTES,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._small_bytes = small_bytes
        self._reserve_bytes = reserve_bytes
        self._charges: dict[BodyCharge, None] = {}
        self.num_bytes = 0

    def open(self, network: str) -> BodyCharge:
        """Returns the account of a new body."""
        charge = BodyCharge(self, network)
        self._charges[charge] = None
        return charge

    def forget(self, charge: BodyCharge) -> None:
        """Drops an account."""
        self._charges.pop(charge, None)

    def make_room(self, newest: BodyCharge) -> None:
        """Sheds bodies that are on their way, large ones first, until the rest fits.

        Args:
            newest: the body that has just grown. It gives way itself where nothing else can, unless it is small and fits the
                reserve.
        """
        while self.num_bytes > self._limit_bytes:
            growing = [charge for charge in self._charges if not charge.is_whole and charge.num_bytes]
            large = [charge for charge in growing if not self._is_small(charge)]
            if self._is_small(newest) and not large and self.num_bytes <= self._limit_bytes + self._reserve_bytes:
                return
            victim = self._heaviest(large or (growing if self._is_small(newest) else ()) or [newest])
            victim.is_shed = True
            victim.close()
            victim.on_shed()
            if victim is newest:
                return

    def _is_small(self, charge: BodyCharge) -> bool:
        return charge.num_bytes <= self._small_bytes

    def _heaviest(self, charges: Sequence[BodyCharge]) -> BodyCharge:
        held: dict[str, int] = {}
        for charge in self._charges:
            held[charge.network] = held.get(charge.network, 0) + charge.num_bytes
        return max(charges, key=lambda charge: (held[charge.network], charge.num_bytes))


# Minimum pace and total time of a request body (as in Apache's mod_reqtimeout).


GRACE_S: Final = 10.0
"""How long a client may stay away before its rate matters; short requests are there by then."""
BYTES_PER_S: Final = 4096
"""Slowest rate of a body, on average: what the slowest mobile networks carry."""


class ShedError(Exception):
    """The body gave way to others: there is no room for it now."""


class BodyPace:
    """How long the next piece of a body may take.

    Only time in which somebody waits for the client counts against its rate: a slow program behind this one is not its fault.

    Args:
        now_s: when the body began, on the clock of the event loop.
        timeout_s: for all of the body.
    """

    def __init__(self, now_s: float, timeout_s: float, *, grace_s: float = GRACE_S, bytes_per_s: float = BYTES_PER_S) -> None:
        self._ends_s = now_s + timeout_s
        self._credit_s = grace_s
        self._bytes_per_s = bytes_per_s

    def deadline(self, now_s: float) -> float:
        """Returns until when the next piece has to come."""
        return min(self._ends_s, now_s + self._credit_s)

    def count(self, waited_s: float, num_bytes: int) -> None:
        """Takes in a piece that was waited for."""
        self._credit_s += num_bytes / self._bytes_per_s - waited_s


async def receive_piece(receive: Receive, charge: BodyCharge, pace: BodyPace) -> Message:
    """Returns the next ASGI message of a body; its bytes are not charged yet.

    Raises:
        TimeoutError: it is too slow.
        ShedError: its body gave way meanwhile.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout_at(pace.deadline(began_s)) as wait:

            def stop() -> None:
                if not wait.expired():
                    wait.reschedule(loop.time())

            charge.on_shed = stop
            message = await receive()
    except TimeoutError:
        if charge.is_shed:
            raise ShedError from None
        raise
    finally:
        charge.on_shed = lambda: None
    if charge.is_shed:
        raise ShedError
    pace.count(loop.time() - began_s, len(message.get("body", b"")))
    return message
