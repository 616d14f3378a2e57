"""How engines of a sealed node reach each other: none of them may open or connect a socket, so descriptors are handed to them.

Each engine has a listener, an unnamed socket that takes descriptors of connections, and the other ends of the others'
listeners. Engines that start again get new ones, so the front passes their listeners on. It makes no connection itself.
Listeners of the front lead to engines of other machines of a unit (`private.unit.carriers`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Final

import msgspec

SEALED: Final = "sealed"
"""The transport of KV inside a sealed node (`engine.kv_sealed_link`)."""
UNREACHED: Final = f"{SEALED}:none"
"""An endpoint that leads nowhere: engines of two members are not connected, so each computes what the other has."""
NUM_DESCRIPTORS: Final = 2
"""The descriptors that come with a `UnitSeat`: the engine's listener, and the socket over which it learns of the others."""
_CONNECT, CARRIED = b"+", b"@"
"""The message that brings a listener a connection: from this machine, or from another one."""
SECRET_BYTES: Final = 32
"""The first message of a front to its end of a carried connection."""
_MESSAGE_BYTES: Final = 16


class LinkSocket(socket.socket):
    """A connection between two engines.

    Attributes:
        secret: shared by its ends, in place of the secret of all engines of a front; None: they use that one.
    """

    secret: bytes | None = None


class CarriedSocket(socket.socket):
    """A connection with an engine of another machine: the front tells its end a secret of this connection first, and what
    follows is sealed (`engine.kv_sealed_link`)."""

    @classmethod
    def adopt(cls, sock: socket.socket) -> CarriedSocket:
        """Takes a socket over."""
        return cls(fileno=sock.detach())


class UnitSeat(msgspec.Struct, frozen=True):
    """An engine's place in its unit; its descriptors come along.

    Attributes:
        index: which engine of the unit it is.
    """

    index: int


@dataclass(frozen=True, slots=True)
class _Member:
    """The front's ends of an engine's sockets."""

    listener: socket.socket
    news: socket.socket


class KVUnit:
    """The engines of one sealed node, as the front introduces them to each other.

    Attributes:
        secret: shared by them alone; drawn here, and kept in locked memory for as long as the node runs.
    """

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._carriers: dict[int, socket.socket] = {}
        from cloister.engine.locked_keys import lock_keys  # only where it is used: it imports cryptography

        self._keys = lock_keys("kv_transfer")
        self._secret = self._keys.draw()

    @property
    def secret(self) -> bytes:
        """A copy, for an engine that starts."""
        secret = self._keys.copy(self._secret)
        assert secret is not None, "it is kept for as long as the unit"
        return secret

    def admit(self, index: int) -> tuple[socket.socket, socket.socket]:
        """Introduces an engine that starts to the others, and the others to it. Returns its ends: its listener and its news. An
        earlier engine with this index is forgotten."""
        self.dismiss(index)
        listener, far_listener = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        news, far_news = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for other, member in self._members.items():
            _introduce(news, other, member.listener)
            _introduce(member.news, index, listener)
        for elsewhere, carrier in self._carriers.items():
            _introduce(news, elsewhere, carrier, is_carrier=True)
        self._members[index] = _Member(listener, news)
        return far_listener, far_news

    def add_carrier(self, index: int, carrier: socket.socket) -> None:
        """Introduces an engine of another machine to those of this one, in place of an earlier one with this number.

        Args:
            index: how the engines of this machine number it.
            carrier: takes descriptors of connections to it; this object owns it from now on.
        """
        if (old := self._carriers.pop(index, None)) is not None:
            old.close()
        self._carriers[index] = carrier
        for member in self._members.values():
            _introduce(member.news, index, carrier, is_carrier=True)

    def deliver(self, index: int, connection: socket.socket) -> None:
        """Gives an engine of this machine a connection that one of another machine made. Raises OSError if it does not run."""
        member = self._members.get(index)
        if member is None:
            raise ConnectionRefusedError("no such engine runs")
        socket.send_fds(member.listener, [CARRIED], [connection.fileno()], socket.MSG_DONTWAIT)

    def dismiss(self, index: int) -> None:
        """Forgets an engine."""
        member = self._members.pop(index, None)
        if member is not None:
            member.listener.close()
            member.news.close()

    def close(self) -> None:
        """Forgets all engines, and wipes the secret."""
        for index in list(self._members):
            self.dismiss(index)
        for carrier in self._carriers.values():
            carrier.close()
        self._carriers.clear()
        self._keys.clear()


def endpoint_of(index: int) -> str:
    """Returns where the others find an engine, even after it was started again."""
    return f"{SEALED}:{index}"


def relative_endpoint(endpoint: str, target: int, num_engines: int) -> str:
    """Returns where an engine of a unit of several machines finds another engine. This differs between machines: each numbers
    its own engines from 0, and those of others after them.

    Args:
        endpoint: of the other one, as the unit numbers it: machine by machine, the leader's first.
        target: which engine of the unit asks.
        num_engines: of each machine.
    """
    kind, _, number = endpoint.partition(":")
    if kind != SEALED or not number.isdigit():
        return endpoint
    machine, engine = divmod(int(number), num_engines)
    own = target // num_engines
    if machine == own:
        return endpoint_of(engine)
    if own == 0:
        return endpoint
    return endpoint_of(num_engines + engine) if machine == 0 else UNREACHED


def _introduce(news: socket.socket, index: int, listener: socket.socket, *, is_carrier: bool = False) -> None:
    message = (CARRIED if is_carrier else b"") + str(index).encode()
    with contextlib.suppress(OSError):  # that engine has ended, and the next one is introduced by `admit`
        socket.send_fds(news, [message], [listener.fileno()], socket.MSG_DONTWAIT)


class UnitPeers:
    """An engine's side: connects to the others by their indexes. Any thread may use it.

    Args:
        news: socket over which the front introduces the others; it is closed here.
    """

    def __init__(self, news: socket.socket) -> None:
        self._news = news
        self._listeners: dict[int, socket.socket] = {}
        self._elsewhere: set[int] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._hear, name="cloister-kv-unit", daemon=True).start()

    def connect(self, index: int) -> socket.socket:
        """Returns a connection to an engine, a `CarriedSocket` to one of another machine. Raises OSError if it does not run."""
        near, far = socket.socketpair()
        try:
            with far, self._lock:
                if index not in self._listeners:
                    raise ConnectionRefusedError("no such engine runs")
                socket.send_fds(self._listeners[index], [_CONNECT], [far.fileno()], socket.MSG_DONTWAIT)
                is_elsewhere = index in self._elsewhere
        except BaseException:
            near.close()
            raise
        return CarriedSocket.adopt(near) if is_elsewhere else near

    def close(self) -> None:
        """Forgets the others."""
        with contextlib.suppress(OSError):
            self._news.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for listener in self._listeners.values():
                listener.close()
            self._listeners.clear()

    def _hear(self) -> None:
        with self._news:
            while True:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._news, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                except OSError:
                    return
                if not message:
                    return
                index, is_elsewhere = int(message.removeprefix(CARRIED)), message.startswith(CARRIED)
                for descriptor in descriptors:
                    listener = socket.socket(fileno=descriptor)
                    with self._lock:
                        old = self._listeners.pop(index, None)
                        self._listeners[index] = listener
                        (self._elsewhere.add if is_elsewhere else self._elsewhere.discard)(index)
                    if old is not None:
                        old.close()


class UnitListener(socket.socket):
    """An engine's listener, as a socket that accepts connections."""

    @classmethod
    def adopt(cls, sock: socket.socket) -> UnitListener:
        """Takes a socket over."""
        return cls(fileno=sock.detach())

    def accept(self) -> tuple[socket.socket, str]:
        """Returns a connection that another engine made. Raises OSError if there will be none."""
        message, descriptors, _, _ = socket.recv_fds(self, len(_CONNECT), 1, socket.MSG_CMSG_CLOEXEC)
        if not (message and descriptors):
            raise ConnectionAbortedError("the front and all other engines have ended")
        return (CarriedSocket if message == CARRIED else socket.socket)(fileno=descriptors[0]), ""
