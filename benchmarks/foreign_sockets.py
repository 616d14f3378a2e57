"""Sockets of other processes: found, watched, cut and made deaf while they are used (Linux, root).

A duplicate of another process's socket (pidfd_getfd(2)) is the same socket: `shutdown` ends its connection, and a socket filter
(SO_ATTACH_FILTER, socket(7)) that takes nothing drops every segment that arrives at it, acknowledgements too. So a TCP
connection becomes half open at a moment of one's choice: no side is told. Unix sockets cannot lose anything, only be cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PIDFD_GETFD: Final = 438
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_TAKE_NOTHING: Final = struct.pack("HBBI", 0x06, 0, 0, 0)
"""BPF: return 0, so that no byte of a segment is kept."""
_SIOCOUTQ: Final = 0x5411
_BYTES_ACKED: Final = 120
"""Where `struct tcp_info` has tcpi_bytes_acked."""
_LISTENS: Final = "0A"
_ESTABLISHED: Final = "01"
_CONNECTED: Final = "03"
_KV_NAME: Final = "@cloister-kv-"
_PAUSE_S: Final = 0.0002
LOOK_EVERY_S: Final = 0.1
"""How often the engines are looked for."""
LEAST_BYTES: Final = 2**15
"""What a source of KV has sent over TCP, and been told to have arrived, when its transfer counts as begun."""
OPEN_S: Final = 0.003
"""Contents in shared memory cannot be seen: such a transfer counts as begun when its connection is so old."""


def duplicate(pid: int, number: int) -> socket.socket:
    """Returns a duplicate of a process's socket. Raises OSError if it is gone."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.syscall(_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=descriptor)


def deafen(sock: socket.socket) -> None:
    """Drops what arrives at a TCP socket from now on."""
    program = ctypes.create_string_buffer(_TAKE_NOTHING, len(_TAKE_NOTHING))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def hear(sock: socket.socket) -> None:
    """Undoes `deafen`."""
    with contextlib.suppress(FileNotFoundError):  # it was not deaf
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def sockets_of(pid: int) -> dict[str, int]:
    """Returns the descriptors of a process's sockets by their inodes."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(path)
                if name.startswith("socket:["):
                    found[name[8:-1]] = int(path.name)
    return found


@dataclass(frozen=True)
class TcpRow:
    """A socket of /proc/net/tcp (proc(5)); addresses as they are there."""

    local: str
    remote: str
    state: str
    inode: str

    @property
    def port(self) -> int:
        return int(self.local.rpartition(":")[2], 16)

    @property
    def remote_port(self) -> int:
        return int(self.remote.rpartition(":")[2], 16)


def tcp_rows() -> list[TcpRow]:
    """Returns all TCP sockets of this network."""
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return [TcpRow(words[1], words[2], words[3], words[9]) for words in lines]


@contextlib.contextmanager
def deaf(find: Callable[[], Iterable[tuple[int, int]]]) -> Iterator[Callable[[], None]]:
    """Makes sockets deaf for a time; call what it yields now and then, so that later ones of the same kind are deaf too.

    Args:
        find: returns process and descriptor of each.
    """
    heard: dict[tuple[int, int], socket.socket] = {}

    def look() -> None:
        for place in find():
            if place not in heard:
                with contextlib.suppress(OSError):
                    heard[place] = duplicate(*place)
                    deafen(heard[place])

    try:
        look()
        yield look
    finally:
        for sock in heard.values():
            hear(sock)
            sock.close()
        for place in find():  # connections of a listener that was deaf began deaf
            with contextlib.suppress(OSError), duplicate(*place) as sock:
                hear(sock)


def ends_at(port: int, pids: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the sockets of processes that listen on a port, or have a connection that came in there."""
    inodes = {row.inode for row in tcp_rows() if row.port == port}
    return [(pid, number) for pid in pids for inode, number in sockets_of(pid).items() if inode in inodes]


def ends_to(port: int, pids: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the sockets of processes that are connected to a port."""
    inodes = {row.inode for row in tcp_rows() if row.remote_port == port and row.state == _ESTABLISHED}
    return [(pid, number) for pid in pids for inode, number in sockets_of(pid).items() if inode in inodes]


@dataclass
class KVConnection:
    """A connection over which one engine sends KV to another.

    Attributes:
        source: the process that sends.
        asker: the process that has asked.
        source_end: a duplicate of the source's socket.
        asker_end: as well; None for a Unix socket.
    """

    source: int
    asker: int
    source_end: socket.socket
    asker_end: socket.socket | None = None

    @property
    def is_tcp(self) -> bool:
        return self.asker_end is not None

    @property
    def num_acked(self) -> int:
        """Bytes that have arrived at the asker, of a TCP connection."""
        info = self.source_end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        return int(struct.unpack_from("Q", info, _BYTES_ACKED)[0])

    @property
    def num_unread(self) -> int:
        """Bytes that the source has sent and the asker has not read (of a TCP connection: not been sent)."""
        return int(struct.unpack("i", fcntl.ioctl(self.source_end, _SIOCOUTQ, bytes(4)))[0])

    def flows(self, opened_s: float) -> bool:
        """Whether bytes are on their way."""
        if self.is_tcp:
            return self.num_acked >= LEAST_BYTES
        return self.num_unread > 0 or time.monotonic() - opened_s > OPEN_S

    def cut(self) -> None:
        """Ends the connection, of which both sides learn."""
        with contextlib.suppress(OSError):
            self.source_end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the duplicates back."""
        self.source_end.close()
        if self.asker_end is not None:
            self.asker_end.close()


def find_transfer(pids: Sequence[int], over_tls: bool) -> KVConnection | None:
    """Returns a connection for KV between two engines; None if there is none.

    Args:
        pids: both engines.
        over_tls: whether they exchange KV over TCP; else over Unix sockets.
    """
    with contextlib.suppress(OSError):  # it was closed meanwhile
        return _find_tls(pids) if over_tls else _find_unix(pids)
    return None


def _find_unix(pids: Sequence[int]) -> KVConnection | None:
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    inodes = {words[6] for words in lines if len(words) > 7 and words[5] == _CONNECTED and words[7].startswith(_KV_NAME)}
    for pid in pids if inodes else ():
        for inode, number in sockets_of(pid).items():
            if inode in inodes:
                return KVConnection(pid, next(other for other in pids if other != pid), duplicate(pid, number))
    return None


def _find_tls(pids: Sequence[int]) -> KVConnection | None:
    rows = tcp_rows()
    owners = {inode: (pid, number) for pid in pids for inode, number in sockets_of(pid).items()}
    ports = {row.port for row in rows if row.state == _LISTENS and row.inode in owners}
    for row in rows:
        if row.port in ports and row.state == _ESTABLISHED and row.inode in owners:
            far = next((each for each in rows if each.local == row.remote and each.inode in owners), None)
            if far is not None:
                (source, number), (asker, its) = owners[row.inode], owners[far.inode]
                return KVConnection(source, asker, duplicate(source, number), duplicate(asker, its))
    return None


def strike_transfer(
    pids: Callable[[], Sequence[int]], over_tls: bool, act: Callable[[KVConnection], None], timeout_s: float
) -> int | None:
    """Does something to a transfer of KV while its bytes flow; returns the bytes that had arrived over TCP, or those that were
    unread. None if no transfer was caught in time. Blocks."""
    give_up_s, look_s, both = time.monotonic() + timeout_s, 0.0, [0]
    while (now := time.monotonic()) < give_up_s:
        if now >= look_s:
            look_s, both = now + LOOK_EVERY_S, [*pids()]
        found = find_transfer(both, over_tls) if len(both) == 2 else None
        if found is None:
            time.sleep(_PAUSE_S)
            continue
        with contextlib.closing(found), contextlib.suppress(OSError):
            opened_s = time.monotonic()
            while time.monotonic() < opened_s + 1.0 and _is_open(found):
                if found.flows(opened_s):
                    act(found)
                    return found.num_acked if found.is_tcp else found.num_unread
                time.sleep(_PAUSE_S / 4)
    return None


def _is_open(found: KVConnection) -> bool:
    """Whether both ends are still connected."""
    with contextlib.suppress(OSError):
        if not found.is_tcp:
            try:
                return bool(found.source_end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                return True
        return found.source_end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1
    return False
