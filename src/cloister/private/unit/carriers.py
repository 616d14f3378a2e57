"""Carries connections to engines of another machine: from the leader, over TCP, to the member's unit port and its engine.

An engine has a listener, a socket that takes descriptors of connections. For an engine of a member the leader's front makes one
of its own, a carrier: each connection that comes is carried over a TCP connection that begins with a header. Its number, and a
MAC under a key that only the two fronts have, admit it once. So workers and engines know nothing of machines.

What is carried is sealed from end to end (`engine.kv_sealed_link`): its ends agree on keys of their own, with a secret of this
one connection that each front tells its end first. No engine and no worker has a key of another connection, and who taps the
network, or changes, repeats or cuts what passes, reads nothing and ends it. The fronts could open what they carry, as they
could before; both are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.engine.channel import wait_readable
from cloister.engine.locked_keys import KEY_BYTES, LockedKeys
from cloister.engine.sealed_channels import CARRIED
from cloister.private.unit.pairing import CARRY, Pair, UnitRefusedError

CHANNEL, KV_LINK = b"w", b"k"
"""What a carried connection is: a worker's channel, or one between two engines."""
CONNECT_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 10.0
"""For one direction after the other one has ended."""
DEAD_S: Final = 6
"""A machine that does not answer for so long is gone: its carried connections end."""
WINDOW: Final = 4096
"""Connections may arrive in another order than they were begun in, by so many places."""
MAX_CARRIED: Final = 4096
"""Connections of one pair at once; a further one is closed."""
_HEAD: Final = struct.Struct(">c16sHQ")
_MAC_BYTES: Final = 32
_LABEL: Final = b"cloister/unit-carrier/1"
_BUFFER_BYTES: Final = 2**16
_MESSAGE_BYTES: Final = 16

_logger = logging.getLogger(__name__)


class _PairKeys:
    """What both fronts derive from the secret of their pair, in locked memory until `close`."""

    def __init__(self, memory: LockedKeys, pair: Pair) -> None:
        derived = HKDF(hashes.SHA256(), 2 * KEY_BYTES, pair.id, _LABEL).derive(pair.secret)
        self._memory = memory
        self._of_heads, self._of_ends = memory.put(derived[:KEY_BYTES]), memory.put(derived[KEY_BYTES:])

    def authenticate(self, head: bytes) -> bytes:
        """Returns the MAC of a header. Raises ConnectionAbortedError after `close`."""
        return self._digest(self._of_heads, head)

    def secret_of(self, head: bytes) -> bytes:
        """Returns what the two ends of one connection know. Raises ConnectionAbortedError after `close`."""
        return self._digest(self._of_ends, head)

    def close(self) -> None:
        """Wipes the keys."""
        self._memory.forget(self._of_heads)
        self._memory.forget(self._of_ends)

    def _digest(self, number: int, message: bytes) -> bytes:
        digest = self._memory.use(number, lambda key: hmac.digest(key, message, "sha256"))
        if digest is None:
            raise ConnectionAbortedError("the pair has ended")
        return digest


class _Carried:
    """The connections of one pair, which end with it."""

    def __init__(self, memory: LockedKeys, pair: Pair) -> None:
        self.pair = pair
        self.keys = _PairKeys(memory, pair)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_full(self) -> bool:
        return len(self._tasks) >= MAX_CARRIED

    def begin(self, work: Coroutine[Any, Any, None], name: str, *owned: socket.socket) -> None:
        """Has something done until it ends, or the pair does; then closes `owned`."""

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            for sock in owned:
                sock.close()

        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(end)  # also of a task that was cancelled before it began

    def close(self) -> None:
        """Ends all connections."""
        self.keys.close()
        for task in list(self._tasks):
            task.cancel()


class LeaderCarriers:
    """The leader's carriers: listeners that lead to engines of members, for as long as these are paired.

    Args:
        memory: for keys.
        keep_listener: called with an engine's number in the unit and a listener of its channels; takes ownership of it.
    """

    def __init__(self, memory: LockedKeys, keep_listener: Callable[[int, socket.socket], None]) -> None:
        self._memory = memory
        self._keep_listener = keep_listener
        self._pairs: dict[bytes, _Carried] = {}
        self._numbers = count(1)

    def add(self, pair: Pair) -> None:
        """Makes the carriers to a member's engines, which are numbered behind those of the machines before it."""
        carried = self._pairs[pair.id] = _Carried(self._memory, pair)
        for engine in range(pair.num_engines):
            self._keep_listener(pair.index * pair.num_engines + engine, self._make(carried, CHANNEL, engine))

    def remove(self, pair_id: bytes) -> None:
        """Ends the carriers to a member, and all connections over them: its engines are not reached any more."""
        if (carried := self._pairs.pop(pair_id, None)) is not None:
            carried.close()

    def close(self) -> None:
        """Ends all carriers."""
        for pair_id in list(self._pairs):
            self.remove(pair_id)

    def _make(self, carried: _Carried, purpose: bytes, engine: int) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        far.setblocking(False)
        carried.begin(self._serve(carried, purpose, engine, far), "unit carrier", far)
        return near

    async def _serve(self, carried: _Carried, purpose: bytes, engine: int, listener: socket.socket) -> None:
        while True:
            await wait_readable(listener)
            message, descriptors, _, _ = socket.recv_fds(listener, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            for descriptor in descriptors:
                end = socket.socket(fileno=descriptor)
                if carried.is_full:
                    end.close()
                else:
                    carried.begin(self._carry(carried, purpose, engine, end), "carried connection", end)

    async def _carry(self, carried: _Carried, purpose: bytes, engine: int, end: socket.socket) -> None:
        assert carried.pair.address is not None, "a leader knows its members' addresses"
        head = _HEAD.pack(purpose, carried.pair.id, engine, next(self._numbers))
        family = socket.AF_INET6 if ":" in carried.pair.address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as link, contextlib.suppress(OSError):
            end.setblocking(False)
            link.setblocking(False)
            watch_peer(link)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(link, carried.pair.address)
                await loop.sock_sendall(link, CARRY + head + carried.keys.authenticate(head))
                await loop.sock_sendall(end, carried.keys.secret_of(head))
            await pump(end, link)


@dataclass
class _Window:
    """Numbers of connections that were seen: each is admitted once, and none that is older than `WINDOW` others."""

    highest: int = 0
    seen: int = 0

    def admit(self, number: int) -> bool:
        """Returns whether it is new."""
        if number > self.highest:
            self.seen = (self.seen << min(number - self.highest, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self.highest = number
            return True
        place = self.highest - number
        if place >= WINDOW or self.seen >> place & 1:
            return False
        self.seen |= 1 << place
        return True


class MemberCarriers:
    """A member's side: gives connections that its leader carries to the engines of this machine.

    Args:
        memory: for keys.
    """

    def __init__(self, memory: LockedKeys) -> None:
        self._memory = memory
        self._carried: _Carried | None = None
        self._window = _Window()
        self._listeners: dict[int, socket.socket] = {}

    def keep_listener(self, engine: int, listener: socket.socket) -> None:
        """Takes the listener of an engine's channels over, in place of an earlier one."""
        if (old := self._listeners.pop(engine, None)) is not None:
            old.close()
        self._listeners[engine] = listener

    def set_leader(self, pair: Pair) -> None:
        """Serves this leader from now on."""
        self._end()
        self._carried, self._window = _Carried(self._memory, pair), _Window()

    def remove_leader(self, pair_id: bytes) -> None:
        """Ends all connections of a leader, if it is still served."""
        if self._carried is not None and self._carried.pair.id == pair_id:
            self._end()

    def close(self) -> None:
        """Ends all connections, and reaches no engine any more."""
        self._end()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    async def carry(self, link: socket.socket, first: bytes) -> None:
        """Takes over a connection to the unit port that begins with `CARRY`; the caller limits the time.

        Raises:
            UnitRefusedError: the leader did not make it, or has made it before; nothing more was read.
            OSError: the engine does not run, or the connection has ended.
        """
        loop = asyncio.get_running_loop()
        received = bytearray()
        while (missing := _HEAD.size + _MAC_BYTES - len(received)) > 0:
            if not (data := await loop.sock_recv(link, missing)):
                raise ConnectionAbortedError("it ended before its header")
            received += data
        head, mac = bytes(received[: _HEAD.size]), bytes(received[_HEAD.size :])
        purpose, pair_id, engine, number = _HEAD.unpack(head)
        carried = self._carried
        if carried is None or carried.pair.id != pair_id or not hmac.compare_digest(carried.keys.authenticate(head), mac):
            raise UnitRefusedError("carrier", "a connection was not made by this member's leader")
        if not self._window.admit(number):
            raise UnitRefusedError("carrier", "a connection of the leader was repeated by somebody else")
        if carried.is_full:
            raise ConnectionRefusedError("there are too many connections")
        listener = self._listeners.get(engine) if purpose == CHANNEL else None
        if listener is None:
            raise ConnectionRefusedError("no such engine runs")
        near, far = socket.socketpair()
        try:
            near.setblocking(False)
            with far:
                await loop.sock_sendall(near, carried.keys.secret_of(head))
                socket.send_fds(listener, [CARRIED], [far.fileno()], socket.MSG_DONTWAIT)
            watch_peer(link)
        except BaseException:
            near.close()
            raise
        carried.begin(_pump_all(near, link), "carried connection", near, link)

    def _end(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None:
            carried.close()


async def _pump_all(near: socket.socket, link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        await pump(near, link)


def watch_peer(link: socket.socket) -> None:
    """Has the kernel end a TCP connection whose other machine does not answer, also while nothing is sent."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_S // 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_S // 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)


async def pump(one: socket.socket, other: socket.socket) -> None:
    """Passes on what either side sends until both have ended, or one has failed; it keeps one buffer for each direction, and
    reads no more before that is sent. The caller closes both.

    Raises:
        OSError: a side has failed.
    """
    directions = {asyncio.create_task(_pass_on(one, other)), asyncio.create_task(_pass_on(other, one))}
    try:
        ended, left = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        if left:
            await asyncio.wait(left, timeout=LINGER_S)
    finally:
        for task in directions:
            task.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


async def _pass_on(source: socket.socket, target: socket.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(_BUFFER_BYTES))
    while num_bytes := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(target, buffer[:num_bytes])
    target.shutdown(socket.SHUT_WR)
