"""TCP between machines, in virtual time: bytes arrive late, once and in order, until the connection ends. A path may be cut, a
machine lose its power, and an attacker on the path ends, holds, changes and repeats connections.

Each side of a connection is one end of the kernel's local stream sockets; the other end of it is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

HOST: Final[ContextVar[str]] = ContextVar("HOST")
"""The address of the machine whose code runs."""
RETRY_S: Final = 1.0
"""Until a packet that was lost is sent again."""
FULL_S: Final = 0.01
"""Until a sender asks again whether there is room."""
KEPT_BYTES: Final = 2**16
"""Most bytes of one direction on their way; the sender waits."""
_READ_BYTES: Final = 2**16

Address = tuple[str, int]


class TcpSocket(socket.socket):
    """A side's socket. Options of TCP are noted; a connection that was reset says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tcp_options: dict[int, int] = {}
        self.is_reset = False

    def setsockopt(self, level: int, optname: int, *value: Any) -> None:
        if level == socket.IPPROTO_TCP:
            self.tcp_options[optname] = value[0]
        else:
            super().setsockopt(level, optname, *value)

    def recv(self, *args: Any) -> bytes:
        data = super().recv(*args)
        if not data and self.is_reset:
            raise ConnectionResetError("the connection was reset")
        return data


class TcpListener(socket.socket):
    """A listening socket: readable while connections wait, whose first bytes wait here."""

    def __init__(self, near: socket.socket, knock: socket.socket) -> None:
        super().__init__(fileno=near.detach())
        self._knock = knock
        self._waiting: deque[TcpSocket] = deque()

    def accept(self) -> tuple[TcpSocket, str]:
        self.recv(1)
        return self._waiting.popleft(), ""

    def add(self, sock: TcpSocket) -> None:
        """Lets a connection wait."""
        self._waiting.append(sock)
        self._knock.send(b".")

    def close(self) -> None:
        """Ends it, and what waits."""
        super().close()
        self._knock.close()
        for sock in self._waiting:
            sock.close()
        self._waiting.clear()


class _Side:
    """One side of a connection.

    Attributes:
        wire: the end of its local socket that is here.
        options: returns its options of TCP.
        has_ended: it sends nothing more.
        is_gone: its machine has no such connection any more.
    """

    def __init__(self, host: str, wire: socket.socket, note_reset: Callable[[], None]) -> None:
        self.host, self.wire, self.note_reset = host, wire, note_reset
        wire.setblocking(False)
        self.options: Callable[[], dict[int, int]] = dict
        self.has_ended = self.is_gone = False
        self.is_read = False
        self.unsent: deque[tuple[float, bytes]] = deque()  # what it has sent and the other one does not have yet
        self.num_unsent = 0
        self.heard_s = 0.0


class TcpConnection:
    """A connection.

    Attributes:
        number: in the order in which they were made.
        said: what its client has sent, which an attacker on the path may record.
        is_held: an attacker passes nothing on, and lets each side believe that the other one is there.
        changes: an attacker changes a bit of the next bytes.
    """

    def __init__(self, network: TcpNetwork, number: int, client: _Side, server: _Side) -> None:
        self.number, self.client, self.server = number, client, server
        self.said = bytearray()
        self.is_held = self.changes = False
        self._network = network
        self._loop = asyncio.get_running_loop()
        for side in (client, server):
            side.heard_s = self._loop.time()
            self._watch(side)
        self._timer = self._loop.call_later(RETRY_S, self._look)

    @property
    def has_ended(self) -> bool:
        return self.client.is_gone and self.server.is_gone

    def goes_between(self, one: str, other: str) -> bool:
        return {self.client.host, self.server.host} == {one, other}

    def other(self, side: _Side) -> _Side:
        return self.server if side is self.client else self.client

    def reset(self) -> None:
        """Ends it for both sides, as an attacker can who sees it."""
        for side in (self.client, self.server):
            if self._network.is_on(side.host):
                self.end(side, is_reset=True)

    def end(self, side: _Side, *, is_reset: bool) -> None:
        """Has a side's machine forget it; its program notices."""
        if side.is_gone:
            return
        if is_reset:
            side.note_reset()
        self._forget(side)
        side.unsent.clear()
        side.num_unsent = 0

    def kill(self, side: _Side) -> None:
        """Ends the program of a side: what it has sent comes before the end."""
        is_full = True
        while is_full and not (side.is_gone or side.has_ended):
            self._watch(side)
            self._read(side)
            is_full = not side.is_read  # it was not read to its end
        if not (side.is_gone or side.has_ended):
            self._finish(side)
        if not side.is_gone:
            self._forget(side)  # what it has not sent yet goes on from its machine's kernel

    def _forget(self, side: _Side) -> None:
        self._ignore(side)
        side.is_gone = True
        side.wire.close()
        if self.has_ended:
            self._timer.cancel()
            self._network.forget(self)

    def _watch(self, side: _Side) -> None:
        if not side.is_read:
            side.is_read = True
            self._loop.add_reader(side.wire, self._read, side)

    def _ignore(self, side: _Side) -> None:
        if side.is_read:
            side.is_read = False
            self._loop.remove_reader(side.wire)

    def _read(self, side: _Side) -> None:
        while side.is_read:
            try:
                data = side.wire.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # its program has left something unread
                self.end(side, is_reset=False)
                self._loop.call_later(self._network.delay_s, self._pass_reset, side)
                return
            if not data:
                self._ignore(side)
                self._finish(side)
                return
            if side is self.client:
                self.said += data
            self._send(side, data)
            if side.num_unsent >= KEPT_BYTES:
                self._ignore(side)

    def _finish(self, side: _Side) -> None:
        side.has_ended = True
        self._send(side, b"")

    def _send(self, side: _Side, data: bytes) -> None:
        """Sends bytes; none are the end of all."""
        side.unsent.append((self._loop.time() + self._network.delay_s, data))
        side.num_unsent += len(data)
        self._loop.call_later(self._network.delay_s, self._pass_on, side)

    def _pass_reset(self, side: _Side) -> None:
        """Tells the other side, unless that is lost: then the next packet from there is answered so."""
        if not self.is_held and self._network.passes(side.host, self.other(side).host):
            self.end(self.other(side), is_reset=True)

    def _pass_on(self, side: _Side) -> None:
        """Brings what is there by now to the other side."""
        other, now_s = self.other(side), self._loop.time() + 1e-9
        if self.is_held or not self._network.passes(side.host, other.host):
            return  # it is sent again later
        while side.unsent and side.unsent[0][0] <= now_s:
            if other.is_gone:  # its machine answers that it knows of no such connection
                side.unsent.clear()
                self.end(side, is_reset=True)
                return
            sent_s, data = side.unsent.popleft()
            if not data:
                with contextlib.suppress(OSError):
                    other.wire.shutdown(socket.SHUT_WR)
                if other.has_ended and not other.unsent:
                    self._close()
                return
            if self.changes:
                self.changes = False
                data = bytes([data[0] ^ 1]) + data[1:]
            try:
                num_bytes = other.wire.send(data)
            except BlockingIOError:
                num_bytes = 0
            except OSError:  # its program has closed it
                self.end(other, is_reset=False)
                self.end(side, is_reset=True)
                return
            side.num_unsent -= num_bytes
            if num_bytes < len(data):
                side.unsent.appendleft((sent_s, data[num_bytes:]))
                self._loop.call_later(FULL_S, self._pass_on, side)  # until its program has read some
                break
        if side.num_unsent < KEPT_BYTES and not (side.has_ended or side.is_gone):
            self._watch(side)

    def _close(self) -> None:
        for side in (self.client, self.server):
            self.end(side, is_reset=False)

    def _look(self) -> None:
        """Sends again what was lost, and asks whether the other machine is there (TCP_KEEPIDLE, TCP_USER_TIMEOUT)."""
        now_s = self._loop.time()
        for side in (self.client, self.server):
            other = self.other(side)
            is_reached = self._network.passes(side.host, other.host) and self._network.passes(other.host, side.host)
            if is_reached:
                side.heard_s = now_s
                if other.is_gone and not other.has_ended and not side.is_gone and self._asks(side):
                    self.end(side, is_reset=True)
            elif self._asks(side) and (now_s - side.heard_s) * 1000 >= side.options()[socket.TCP_USER_TIMEOUT]:
                self.end(side, is_reset=True)
            if side.unsent and not self.has_ended:
                self._pass_on(side)
        if not self.has_ended:
            self._timer = self._loop.call_later(RETRY_S, self._look)

    def _asks(self, side: _Side) -> bool:
        return self._network.is_on(side.host) and socket.TCP_USER_TIMEOUT in side.options()


class TcpNetwork:
    """Machines, and the paths between them.

    Args:
        delay_s: of a packet.

    Attributes:
        connections: those that one of their sides knows of.
        ended: what was said over connections that have ended, by the server's host: an attacker has recorded it.
        log: called with what happens.
    """

    def __init__(self, delay_s: float, log: Callable[[str, int], None]) -> None:
        self.delay_s = delay_s
        self.connections: list[TcpConnection] = []
        self.num_made = 0
        self.ended: dict[str, list[bytes]] = {}
        self.log = log
        self._listeners: dict[Address, TcpListener] = {}
        self._cut: Counter[tuple[str, str]] = Counter()
        self._off: set[str] = set()
        self._sides: weakref.WeakKeyDictionary[socket.socket, list[bool]] = weakref.WeakKeyDictionary()

    def listen(self, address: Address) -> TcpListener:
        """Returns a listening socket."""
        near, knock = socket.socketpair()
        knock.setblocking(False)
        listener = self._listeners[address] = TcpListener(near, knock)
        return listener

    def is_on(self, host: str) -> bool:
        """Whether a machine has power."""
        return host not in self._off

    def passes(self, source: str, target: str) -> bool:
        """Whether packets get from one machine to another one."""
        return not (self._cut[source, target] or source in self._off or target in self._off)

    def cut(self, source: str, target: str) -> None:
        """Has nothing pass in this direction, until it was mended as often."""
        self._cut[source, target] += 1

    def mend(self, source: str, target: str) -> None:
        """Ends one cut."""
        self._cut[source, target] -= 1

    def turn_off(self, host: str) -> None:
        """Takes a machine's power: nobody is told."""
        self._off.add(host)
        self._close_ports(host)
        for connection in list(self.connections):
            for side in (connection.client, connection.server):
                if side.host == host:
                    connection.end(side, is_reset=False)

    def turn_on(self, host: str) -> None:
        """Gives it power again; it knows of no connection."""
        self._off.discard(host)

    def end_programs(self, host: str) -> None:
        """Ends a machine's programs: its kernel closes what they had open."""
        self._close_ports(host)
        for connection in list(self.connections):
            for side in (connection.client, connection.server):
                if side.host == host:
                    connection.kill(side)

    def _close_ports(self, host: str) -> None:
        for address in [each for each in self._listeners if each[0] == host]:
            self._listeners.pop(address).close()

    async def connect(self, address: Address, sock: socket.socket | None = None) -> socket.socket:
        """Returns a connection; it waits for as long as nothing answers.

        Args:
            sock: becomes its socket; None: another one.

        Raises:
            ConnectionRefusedError: nothing listens there.
        """
        source = HOST.get()
        while True:
            await asyncio.sleep(2 * self.delay_s)
            if self.passes(source, address[0]) and self.passes(address[0], source):
                break
            await asyncio.sleep(RETRY_S)
        listener = self._listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError("nothing listens there")
        (mine, near), (theirs, far) = socket.socketpair(), socket.socketpair()
        accepted = TcpSocket(fileno=theirs.detach())
        server = _Side(address[0], far, lambda: setattr(accepted, "is_reset", True))
        server.options = lambda: accepted.tcp_options
        if sock is None:
            client_socket = TcpSocket(fileno=mine.detach())
            client = _Side(source, near, lambda: setattr(client_socket, "is_reset", True))
            client.options = lambda: client_socket.tcp_options
            sock = client_socket
            sock.setblocking(False)
        else:
            marks = self._sides.setdefault(sock, [])
            client = _Side(source, near, lambda: marks.append(True))
            options = {
                name: sock.getsockopt(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_USER_TIMEOUT,)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            }
            client.options = lambda: options
            os.dup2(mine.fileno(), sock.fileno(), inheritable=False)
            mine.close()
            sock.setblocking(False)
        self.num_made += 1
        self.connections.append(TcpConnection(self, self.num_made, client, server))
        self.log("connect", self.num_made)
        listener.add(accepted)
        return sock

    def check_reset(self, sock: socket.socket) -> None:
        """Raises ConnectionResetError for a socket that came from elsewhere, and was reset."""
        if self._sides.get(sock):
            raise ConnectionResetError("the connection was reset")

    def forget(self, connection: TcpConnection) -> None:
        """Called when neither side knows it any more."""
        self.log("end", connection.number)
        self.connections.remove(connection)
        self.ended.setdefault(connection.server.host, []).append(bytes(connection.said))
