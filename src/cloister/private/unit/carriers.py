"""Forwards connections to engines of another machine: from the leader, over TCP, to the member's unit port and its engine.

An engine has a listener, a socket that receives descriptors of connections. The leader's front opens one more listener, a
carrier, for each engine of a member, and forwards each connection to it over a TCP connection of its own. The TCP connection
begins with a header. The header's number, and a MAC under a key that only the two fronts have, admit it once. So workers and
engines need not know about machines.

Only the leader opens connections. When a member's engine loads KV from an engine of the leader, the member uses one of a few
connections that the leader keeps in reserve, and names the engine in a message with a MAC. Engines of two members never load KV
from each other.

Forwarded data are sealed end to end (`engine.kv_sealed_link`): the two ends agree on keys of their own, based on a secret of
this one connection, which each front first sends to its end. No engine or worker has a key of another connection. An attacker
in the network cannot read anything; changing, repeating or dropping data only ends the connection. The fronts could open what
they forward, as fronts could before; both are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.engine.channel import wait_readable
from cloister.engine.kv_unit import CARRIED, KVUnit
from cloister.engine.locked_keys import KEY_BYTES, LockedKeys
from cloister.private.unit.pairing import CARRY, Pair, UnitRefusedError

CHANNEL, KV_LINK, RESERVE = b"w", b"k", b"r"
"""Purpose of a forwarded connection: a worker's channel, a KV load by the leader's engine, or reserve for loads by members."""
NUM_RESERVED: Final = 4
"""Reserve connections, on which the member's engines can load KV."""
RESERVE_PAUSE_S: Final = 1.0
"""Delay before the leader reopens a failed reserve connection."""
CONNECT_TIMEOUT_S: Final = 5.0
LINGER_S: Final = 10.0
"""How long one direction may continue after the other one has ended."""
DEAD_S: Final = 6
"""Timeout for an unresponsive machine, after which its forwarded connections end."""
WINDOW: Final = 4096
"""How far connections may arrive out of order, in connection numbers."""
MAX_CARRIED: Final = 4096
"""Maximum number of concurrent worker channels of a pair; further ones are closed."""
MAX_CARRIED_KV: Final = 1024
"""The same for KV connections in both directions. A separate limit, so that engines cannot take channels from workers."""
_HEAD: Final = struct.Struct(">c16sHQ")
_ENGINE: Final = struct.Struct(">H")
_MAC_BYTES: Final = 32
_LABEL: Final = b"cloister/unit-carrier/1"
_BUFFER_BYTES: Final = 2**16
_MESSAGE_BYTES: Final = 16

_logger = logging.getLogger(__name__)


class _PairKeys:
    """Keys that both fronts derive from the secret of their pair, in locked memory until `close`."""

    def __init__(self, memory: LockedKeys, pair: Pair) -> None:
        derived = HKDF(hashes.SHA256(), 2 * KEY_BYTES, pair.id, _LABEL).derive(pair.secret)
        self._memory = memory
        self._of_heads, self._of_ends = memory.put(derived[:KEY_BYTES]), memory.put(derived[KEY_BYTES:])

    def authenticate(self, head: bytes) -> bytes:
        """Returns the MAC of a header. Raises ConnectionAbortedError after `close`."""
        return self._digest(self._of_heads, head)

    def secret_of(self, head: bytes) -> bytes:
        """Returns the shared secret of one connection's two ends. Raises ConnectionAbortedError after `close`."""
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
    """The forwarded connections of one pair; they end with the pair."""

    def __init__(self, memory: LockedKeys, pair: Pair) -> None:
        self.pair = pair
        self.keys = _PairKeys(memory, pair)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_channels = self._num_kv_links = 0
        self.has_ended = False

    def is_full(self, purpose: bytes) -> bool:
        """Whether the limit of connections for this purpose is reached."""
        return self._num_channels >= MAX_CARRIED if purpose == CHANNEL else self._num_kv_links >= MAX_CARRIED_KV

    def begin(self, work: Coroutine[Any, Any, None], name: str, *owned: socket.socket, purpose: bytes | None = None) -> None:
        """Runs a task, which is cancelled when the pair ends; then closes `owned`. Raises OSError if the pair has ended.

        Args:
            purpose: purpose of a connection, which counts towards the limit while the task runs.
        """
        if self.has_ended:
            work.close()
            for sock in owned:
                sock.close()
            raise ConnectionAbortedError("the pair has ended")
        self._count(purpose, 1)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._count(purpose, -1)
            for sock in owned:
                sock.close()

        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(end)  # runs even if the task is cancelled before it starts

    def _count(self, purpose: bytes | None, change: int) -> None:
        if purpose == CHANNEL:
            self._num_channels += change
        elif purpose is not None:
            self._num_kv_links += change

    def close(self) -> None:
        """Ends all connections."""
        self.has_ended = True
        self.keys.close()
        for task in list(self._tasks):
            task.cancel()


class LeaderCarriers:
    """The leader's side: listeners that forward to engines of paired members.

    Args:
        memory: locked memory for keys.
        keep_listener: called with an engine's number in the unit and a listener of its channels; takes ownership of it.
        kv_unit: the engines of this machine, if engines exchange KV.
    """

    def __init__(
        self, memory: LockedKeys, keep_listener: Callable[[int, socket.socket], None], kv_unit: KVUnit | None = None
    ) -> None:
        self._memory = memory
        self._keep_listener = keep_listener
        self._kv_unit = kv_unit
        self._pairs: dict[bytes, _Carried] = {}
        self._numbers = count(1)

    def add(self, pair: Pair) -> None:
        """Opens the carriers to a member's engines. Engines are numbered consecutively over all machines of the unit."""
        carried = self._pairs[pair.id] = _Carried(self._memory, pair)
        for engine in range(pair.num_engines):
            number = pair.index * pair.num_engines + engine
            self._keep_listener(number, self._make(carried, CHANNEL, engine))
            if self._kv_unit is not None:
                self._kv_unit.add_carrier(number, self._make(carried, KV_LINK, engine))
        if self._kv_unit is not None:
            for _ in range(NUM_RESERVED):
                carried.begin(self._keep_reserve(carried, self._kv_unit), "unit reserve")

    def remove(self, pair_id: bytes) -> None:
        """Closes the carriers to a member and all forwarded connections."""
        if (carried := self._pairs.pop(pair_id, None)) is not None:
            carried.close()

    def close(self) -> None:
        """Closes all carriers."""
        for pair_id in list(self._pairs):
            self.remove(pair_id)

    def _make(self, carried: _Carried, purpose: bytes, engine: int) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        far.setblocking(False)
        carried.begin(self._serve(carried, purpose, engine, far), "unit carrier", far)
        return near

    async def _serve(self, carried: _Carried, purpose: bytes, engine: int, listener: socket.socket) -> None:
        async for end in _accept(listener):
            if carried.is_full(purpose):
                end.close()
            else:
                carried.begin(self._carry(carried, purpose, engine, end), "carried connection", end, purpose=purpose)

    async def _carry(self, carried: _Carried, purpose: bytes, engine: int, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                link, head = await self._connect(carried, purpose, engine)
            with link:
                end.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(end, carried.keys.secret_of(head))
                await pump(end, link)

    async def _connect(self, carried: _Carried, purpose: bytes, engine: int) -> tuple[socket.socket, bytes]:
        """Returns a connection to the member, and the header that was sent. Raises OSError if it cannot connect."""
        assert carried.pair.address is not None, "a leader knows its members' addresses"
        head = _HEAD.pack(purpose, carried.pair.id, engine, next(self._numbers))
        link = socket.socket(socket.AF_INET6 if ":" in carried.pair.address[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.setblocking(False)
            watch_peer(link)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(link, carried.pair.address)
            await loop.sock_sendall(link, CARRY + head + carried.keys.authenticate(head))
        except BaseException:
            link.close()
            raise
        return link, head

    async def _keep_reserve(self, carried: _Carried, kv_unit: KVUnit) -> None:
        """Keeps one reserve connection open for the member's engines, and replaces it once it is used."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    link, head = await self._connect(carried, RESERVE, 0)
                try:
                    while carried.is_full(KV_LINK):
                        await asyncio.sleep(RESERVE_PAUSE_S)
                    said = await _receive(link, _ENGINE.size + _MAC_BYTES)
                    request = head + said[: _ENGINE.size]
                    if not hmac.compare_digest(carried.keys.authenticate(request), said[_ENGINE.size :]):
                        raise ConnectionAbortedError("the member did not say so")
                    near = await _hand_over(carried.keys.secret_of(request), kv_unit, *_ENGINE.unpack(said[: _ENGINE.size]))
                except BaseException:
                    link.close()
                    raise
                carried.begin(_pump_all(near, link), "carried connection", near, link, purpose=KV_LINK)
            except OSError:
                await asyncio.sleep(RESERVE_PAUSE_S)


@dataclass
class _Window:
    """Anti-replay window over connection numbers: admits each number once, and none older than the newest by `WINDOW`."""

    highest: int = 0
    seen: int = 0

    def admit(self, number: int) -> bool:
        """Returns whether the number is new, and marks it as seen."""
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
    """A member's side: hands connections forwarded by its leader to the engines of this machine.

    Args:
        memory: locked memory for keys.

    Attributes:
        kv_unit: the engines of this machine, if engines exchange KV.
    """

    def __init__(self, memory: LockedKeys) -> None:
        self.kv_unit: KVUnit | None = None
        self._memory = memory
        self._carried: _Carried | None = None
        self._window = _Window()
        self._listeners: dict[int, socket.socket] = {}
        self._reserve: asyncio.Queue[tuple[socket.socket, bytes]] = asyncio.Queue(NUM_RESERVED)

    def keep_listener(self, engine: int, listener: socket.socket) -> None:
        """Takes ownership of the listener of an engine's channels; replaces an earlier one."""
        if (old := self._listeners.pop(engine, None)) is not None:
            old.close()
        self._listeners[engine] = listener

    def set_leader(self, pair: Pair) -> None:
        """Serves this leader, in place of an earlier one."""
        self._end()
        carried = self._carried = _Carried(self._memory, pair)
        self._window = _Window()
        if self.kv_unit is not None:
            for engine in range(pair.num_engines):
                near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                far.setblocking(False)
                self.kv_unit.add_carrier(pair.num_engines + engine, near)
                carried.begin(self._serve(carried, engine, far), "unit carrier", far)

    def remove_leader(self, pair_id: bytes) -> None:
        """Ends all connections of a leader, if it is still served."""
        if self._carried is not None and self._carried.pair.id == pair_id:
            self._end()

    def close(self) -> None:
        """Ends all connections, and closes the engines' listeners."""
        self._end()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()

    async def carry(self, link: socket.socket, first: bytes) -> None:
        """Takes ownership of a connection to the unit port that begins with `CARRY`; the caller limits the time.

        Raises:
            UnitRefusedError: it is not from the leader, or a replay; nothing more was read.
            OSError: the engine does not run, or the connection has ended.
        """
        received = await _receive(link, _HEAD.size + _MAC_BYTES)
        head, mac = received[: _HEAD.size], received[_HEAD.size :]
        purpose, pair_id, engine, number = _HEAD.unpack(head)
        carried = self._carried
        if carried is None or carried.pair.id != pair_id or not hmac.compare_digest(carried.keys.authenticate(head), mac):
            raise UnitRefusedError("carrier", "a connection was not made by this member's leader")
        if not self._window.admit(number):
            raise UnitRefusedError("carrier", "a connection of the leader was repeated by somebody else")
        watch_peer(link)
        if purpose == RESERVE:
            if self._reserve.full():  # the leader keeps no more than these, so it has lost the oldest one
                self._reserve.get_nowait()[0].close()
            self._reserve.put_nowait((link, head))
            return
        if carried.is_full(purpose):
            raise ConnectionRefusedError("there are too many connections")
        target = self.kv_unit if purpose == KV_LINK else self._listeners.get(engine) if purpose == CHANNEL else None
        if target is None:
            raise ConnectionRefusedError("no such engine runs")
        near = await _hand_over(carried.keys.secret_of(head), target, engine)
        carried.begin(_pump_all(near, link), "carried connection", near, link, purpose=purpose)

    async def _serve(self, carried: _Carried, engine: int, listener: socket.socket) -> None:
        async for end in _accept(listener):
            if carried.is_full(KV_LINK):
                end.close()
            else:
                carried.begin(self._carry_back(carried, engine, end), "carried connection", end, purpose=KV_LINK)

    async def _carry_back(self, carried: _Carried, engine: int, end: socket.socket) -> None:
        """Forwards a connection to an engine of the leader over a reserve connection."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                link, request = await self._take_reserved(carried, engine)
            with link:
                end.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(end, carried.keys.secret_of(request))
                await pump(end, link)

    async def _take_reserved(self, carried: _Carried, engine: int) -> tuple[socket.socket, bytes]:
        """Returns the first reserve connection that is still open, and the request for the engine that was sent over it. Raises
        OSError if the pair has ended."""
        while True:
            link, head = await self._reserve.get()
            request = head + _ENGINE.pack(engine)
            try:
                if _has_ended(link):
                    raise ConnectionAbortedError("the leader has ended it")
                mac = carried.keys.authenticate(request)
                await asyncio.get_running_loop().sock_sendall(link, _ENGINE.pack(engine) + mac)
            except BaseException as error:
                link.close()
                if not isinstance(error, OSError) or carried.has_ended:
                    raise
            else:
                return link, request

    def _end(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None:
            carried.close()
        while not self._reserve.empty():
            self._reserve.get_nowait()[0].close()


async def _accept(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Yields the connections whose descriptors arrive at a listener, until its other end is closed."""
    while True:
        await wait_readable(listener)
        message, descriptors, _, _ = socket.recv_fds(listener, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        for descriptor in descriptors:
            try:
                sock = socket.socket(fileno=descriptor)
            except OSError:  # not a socket: a healthy sender never passes one
                os.close(descriptor)
            else:
                yield sock


def _has_ended(link: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it never speaks first."""
    try:
        return link.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Returns exactly `num_bytes` bytes. Raises OSError if the connection ends before."""
    received = bytearray()
    while len(received) < num_bytes:
        if not (data := await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(received))):
            raise ConnectionAbortedError("it ended too early")
        received += data
    return bytes(received)


async def _hand_over(secret: bytes, target: socket.socket | KVUnit, engine: int) -> socket.socket:
    """Passes a new connection, which begins with a secret, to an engine of this machine; returns the other end.

    Args:
        target: listener of the engine's channels, or the KV connections between engines.

    Raises:
        OSError: the engine does not run.
    """
    near, far = socket.socketpair()
    try:
        near.setblocking(False)
        with far:
            await asyncio.get_running_loop().sock_sendall(near, secret)
            if isinstance(target, socket.socket):
                socket.send_fds(target, [CARRIED], [far.fileno()], socket.MSG_DONTWAIT)
            else:
                target.deliver(engine, far)
    except BaseException:
        near.close()
        raise
    return near


async def _pump_all(near: socket.socket, link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        await pump(near, link)


def watch_peer(link: socket.socket) -> None:
    """Sets TCP keepalive and timeouts, so that the kernel ends a connection whose peer is unresponsive, even if it is idle."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_S // 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_S // 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)


async def pump(one: socket.socket, other: socket.socket) -> None:
    """Forwards data in both directions until both sides have ended or one has failed. Each direction has one buffer, and reads
    again only once it is sent. The caller closes both sockets.

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
