"""TLS handshakes take turns: one at a time, networks in turn, and a bounded share of the event loop.

Answering a ClientHello costs a key exchange and a signature, the most that a stranger can make a server compute for one packet.
asyncio answers all that have arrived before it serves anybody else. Here a handshake waits until its hello is there, and the
only one of a network comes next, however many wait from another.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Hashable
from typing import Final

HANDSHAKE_RECORD: Final = 22
"""ContentType of a TLS record (RFC 8446, section 5.1)."""
RECORD_HEAD_BYTES: Final = 5
MAX_HELLO_BYTES: Final = RECORD_HEAD_BYTES + 2**14
"""One record. A client has nothing else to say before it is answered."""
MAX_SHARE: Final = 0.2
"""Of the event loop's time, for answers to hellos: with P-256 some 400 a second."""
COST_WEIGHT: Final = 0.1
"""Of the newest answer in the mean that the pauses are made from."""


def is_hello_whole(data: bytes | bytearray) -> bool:
    """Whether the first record of a connection has arrived.

    Raises:
        ValueError: it is no handshake, or there is more than a client may send before it is answered.
    """
    if data[:1] not in (b"", bytes((HANDSHAKE_RECORD,))):
        raise ValueError("this is no TLS handshake")
    if len(data) > MAX_HELLO_BYTES:
        raise ValueError("this is longer than a ClientHello")
    return len(data) >= RECORD_HEAD_BYTES and len(data) - RECORD_HEAD_BYTES >= int.from_bytes(data[3:5])


class HandshakeQueue:
    """Begins handshakes that are ready, one at a time, with pauses: answers take a fifth of the event loop's time at most.

    Networks take turns. Inside one the newest comes first. If more arrive than can be answered, first come, first served would
    answer clients that have given up; the newest is still there.

    Attributes:
        tls: what handshakes are made with.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self._networks: dict[str, dict[Hashable, Callable[[], None]]] = {}  # the next network first
        self._cost_s = 0.0
        self._next_s = 0.0
        self._is_running = False

    def enter(self, connection: Hashable, network: str, begin: Callable[[], None]) -> None:
        """Calls `begin` when it is this connection's turn; to be called on the event loop."""
        self._networks.setdefault(network, {})[connection] = begin
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._run)

    def leave(self, connection: Hashable, network: str) -> None:
        """Forgets a connection; one that is not there is no mistake."""
        waiting = self._networks.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._networks.pop(network, None)

    def note_cost(self, cost_s: float) -> None:
        """Takes in how long the event loop was busy with an answer: longer with RSA, or on a machine that has other work."""
        self._cost_s += COST_WEIGHT * (cost_s - self._cost_s)

    def _run(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._networks:
            self._is_running = False
            return
        now_s = loop.time()
        if now_s >= self._next_s:
            self._next_s = now_s + self._cost_s / MAX_SHARE
            self._begin_one()
        loop.call_at(self._next_s, self._run)

    def _begin_one(self) -> None:
        network = next(iter(self._networks))
        waiting = self._networks.pop(network)
        _, begin = waiting.popitem()
        if waiting:
            self._networks[network] = waiting  # behind all others
        begin()
