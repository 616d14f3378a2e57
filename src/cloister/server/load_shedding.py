"""Load shedding: which connection is closed, and which request body is dropped, when a server is full."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from starlette.types import Message, Receive, Scope

from cloister.policy.gate import Admission
from cloister.types.request import KEYLESS_TENANT, TENANT_RATIO

# The network of an address: the range that one peer can be expected to control.
#
# A host with one address of a network often has all of it, so limits per address are ineffective: IPv6 tunnels and hosting
# companies give a /48 to any customer, and a /24 is the smallest block of IPv4 that is routed separately, as a /48 is of IPv6.
# With narrower prefixes one rented block would count as hundreds of peers. Wider ones would combine unrelated users, as
# carrier-grade NAT already does. So there is no quota per network: it only decides what is shed first under load.

IPV4_PREFIX: Final = 24
IPV6_PREFIX: Final = 48


@functools.lru_cache(maxsize=4096)
def network_of(host: str | None) -> str:
    """Returns the /24 (IPv4, mapped addresses too) or /48 (IPv6) of an address; "" for a peer without one."""
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    prefix = IPV4_PREFIX if address.version == 4 else IPV6_PREFIX
    return str(ipaddress.ip_network((address, prefix), strict=False))


def client_network(scope: Scope) -> str:
    """Returns the network of a request's client."""
    client = scope.get("client")
    return network_of(client[0] if client else None)


class Sheddable(Protocol):
    """A connection that can be closed at any moment."""

    def shed(self) -> None:
        """Closes it immediately, without a reply."""


class ConnectionTable:
    """Limits connections, and tracks which of them wait for a client.

    As in nginx, where a full worker closes idle connections rather than refusing new ones. The victim is the oldest connection
    that waits for the rest of a request, or for its client to read its reply, in the network that has most of these. A complete
    request whose client reads is never dropped. So sockets that send or read nothing cannot block others: each new one replaces
    another of its kind.

    Args:
        limit: maximum number of connections.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._networks: dict[Sheddable, str] = {}
        self._waiting: dict[str, dict[Sheddable, None]] = {}  # of each network the oldest first

    def enter(self, connection: Sheddable, host: str | None) -> bool:
        """Adds a connection, which waits at first. Returns False if the table is full because all others have requests in
        progress.
        """
        if len(self._networks) >= self._limit and not self._shed_one():
            return False
        self._networks[connection] = network_of(host)
        self.wait(connection)
        return True

    def wait(self, connection: Sheddable) -> None:
        """Marks a connection as waiting for its client; one that already waits keeps its position."""
        network = self._networks.get(connection)
        if network is not None:
            self._waiting.setdefault(network, {}).setdefault(connection)

    def work(self, connection: Sheddable) -> None:
        """Marks a connection as busy: a whole request has arrived, or its reply has begun. It cannot be shed until `wait`."""
        network = self._networks.get(connection, "")
        waiting = self._waiting.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(network, None)

    def leave(self, connection: Sheddable) -> None:
        """Removes a connection; unknown ones are ignored."""
        self.work(connection)
        self._networks.pop(connection, None)

    def close(self) -> None:
        """Sheds all connections."""
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
"""Default ceiling for all request bodies of one process."""
SMALL_BODY_BYTES: Final = 8 * 2**10
"""Maximum size of a small body; the smallest bucket, sealed twice with X-Wing and with its token, is shorter."""
SMALL_RESERVE_BYTES: Final = 8 * 2**20
"""Reserve above the ceiling, for small bodies only."""


BODY_CHARGE: Final = "body_charge"
"""State key of a request for the charge of its body."""


def find_owner(admission: object) -> str:
    """Returns whose share of that memory a request uses: its tenant's; empty where there are no keys, or none is needed."""
    return admission.tenant if isinstance(admission, Admission) and admission.tenant != KEYLESS_TENANT else ""


class BodyCharge:
    """One body's charge to a budget.

    Attributes:
        network: network of its client.
        owner: who sent it, where clients are known; empty where not.
        num_bytes: current charge.
        is_whole: set by the reader with the last piece; once that is charged the body is never shed.
        is_shed: it was shed, and its reader must release it.
        on_shed: called when it is shed.
    """

    def __init__(self, budget: BodyBudget, network: str, owner: str = "") -> None:
        self._budget = budget
        self.network = network
        self.owner = owner
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
        """Releases bytes that were passed on; those of a shed body are already released."""
        num_bytes = min(num_bytes, self.num_bytes)
        self.num_bytes -= num_bytes
        self._budget.num_bytes -= num_bytes

    def close(self) -> None:
        """Releases the whole charge."""
        self.give_back(self.num_bytes)
        self._budget.forget(self)


def find_body_ceiling(limit_bytes: int) -> int:
    """Returns the ceiling of a server whose bodies have at most `limit_bytes` each, and owners: one of that size fits into the
    share of its owner."""
    return max(BODY_CEILING_BYTES, limit_bytes + -(-limit_bytes // TENANT_RATIO))


class BodyBudget:
    """One memory ceiling for the request bodies of one process, charged as bytes arrive; what a head declares is not charged.

    At the ceiling it sheds the largest incomplete body of the network with the most bytes; complete bodies stay until their
    readers release them. A flood of large bodies therefore drops its own. If complete bodies alone reach the ceiling, small
    ones are still accepted, up to a second limit. Complete bodies are never shed and may stay for as long as their requests, so
    large bodies of one owner may take TENANT_RATIO times what is still free, and others find some memory.

    Args:
        limit_bytes: ceiling of all bodies together; at least the limit of one, with owners more (`find_body_ceiling`).
        small_bytes: maximum size of a small body.
        reserve_bytes: above the limit, for small bodies only.

    Attributes:
        num_bytes: current total; maintained by the charges.
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

    def open(self, network: str, owner: str = "") -> BodyCharge:
        """Returns the account of a new body.

        Args:
            owner: who sends it, where clients are known; empty where not.
        """
        charge = BodyCharge(self, network, owner)
        self._charges[charge] = None
        return charge

    def forget(self, charge: BodyCharge) -> None:
        """Drops an account."""
        self._charges.pop(charge, None)

    def make_room(self, newest: BodyCharge) -> None:
        """Sheds incomplete bodies, large ones first, until the rest fits.

        Args:
            newest: the body that has just grown. It is shed itself if no other can be, unless it is small and fits the reserve;
                and if it is large, and its owner has too much.
        """
        if newest.owner and not self._is_small(newest) and self._has_too_much(newest.owner):
            self._shed(newest)
            return
        while self.num_bytes > self._limit_bytes:
            growing = [charge for charge in self._charges if not charge.is_whole and charge.num_bytes]
            large = [charge for charge in growing if not self._is_small(charge)]
            if self._is_small(newest) and not large and self.num_bytes <= self._limit_bytes + self._reserve_bytes:
                return
            victim = self._heaviest(large or (growing if self._is_small(newest) else ()) or [newest])
            self._shed(victim)
            if victim is newest:
                return

    def _has_too_much(self, owner: str) -> bool:
        free_bytes = max(0, self._limit_bytes - self.num_bytes)
        if self.num_bytes <= TENANT_RATIO * free_bytes:  # nearly always
            return False
        held: Counter[str] = Counter()
        for charge in self._charges:
            held[charge.owner] += charge.num_bytes
        # what is shed of others that hold more becomes free
        others = [charge for charge in self._charges if not charge.is_whole and held[charge.owner] > held[owner]]
        free_bytes += sum(charge.num_bytes for charge in others if not self._is_small(charge))
        return held[owner] > TENANT_RATIO * free_bytes

    def _shed(self, charge: BodyCharge) -> None:
        charge.is_shed = True
        charge.close()
        charge.on_shed()

    def _is_small(self, charge: BodyCharge) -> bool:
        return charge.num_bytes <= self._small_bytes

    def _heaviest(self, charges: Sequence[BodyCharge]) -> BodyCharge:
        held: dict[str, int] = {}
        for charge in self._charges:
            held[charge.network] = held.get(charge.network, 0) + charge.num_bytes
        return max(charges, key=lambda charge: (held[charge.network], charge.num_bytes))


# Minimum pace and total time of a request body (as in Apache's mod_reqtimeout).


GRACE_S: Final = 10.0
"""Grace period before the rate is checked; short requests are complete by then."""
BYTES_PER_S: Final = 4096
"""Minimum average rate of a body: that of the slowest mobile networks."""


class ShedError(Exception):
    """The body was shed: there is no memory for it now."""


class BodyPace:
    """Deadline of the next piece of a body.

    Only time spent waiting for the client counts against its rate, not that of slow programs behind this one.

    Args:
        now_s: when the body began, on the clock of the event loop.
        timeout_s: timeout of the whole body.
    """

    def __init__(self, now_s: float, timeout_s: float, *, grace_s: float = GRACE_S, bytes_per_s: float = BYTES_PER_S) -> None:
        self._ends_s = now_s + timeout_s
        self._credit_s = grace_s
        self._bytes_per_s = bytes_per_s

    def deadline(self, now_s: float) -> float:
        """Returns the deadline of the next piece."""
        return min(self._ends_s, now_s + self._credit_s)

    def count(self, waited_s: float, num_bytes: int) -> None:
        """Records a received piece."""
        self._credit_s += num_bytes / self._bytes_per_s - waited_s


async def receive_piece(receive: Receive, charge: BodyCharge, pace: BodyPace) -> Message:
    """Returns the next ASGI message of a body; its bytes are not charged yet.

    Raises:
        TimeoutError: the client is too slow.
        ShedError: the body was shed meanwhile.
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
