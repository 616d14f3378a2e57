"""Frames between two engines that exchange KV: four bytes of length, big-endian, and that many bytes of one message in msgpack.

The contents of blocks are not part of a frame, so that packing and unpacking does not copy them. They follow the frame on its
socket (`StreamPath`), or lie where both engines reach them (`engine.kv_shared_memory`).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from cloister.types.errors import CloisterError

MAX_HALF_BYTES: Final = 256 * 2**20
"""The largest part of KV for which an engine offers memory: one entry, or parts of a MiB."""
_LENGTH: Final = struct.Struct(">I")
_M = TypeVar("_M")


class KVLinkError(CloisterError):
    """A peer sent something that no engine sends, or sent it too late."""

    code = "kv_link_error"


class KVPeerGoneError(KVLinkError):
    """The other side of a connection has ended it."""


class KVInbox(Protocol):
    """Where the contents of one pull arrive, at the engine that asked."""

    def invite(self, sock: socket.socket, deadline_s: float) -> None:
        """Tells the source where to put the contents."""
        ...

    def receive(self, sock: socket.socket, num_bytes: int, deadline_s: float) -> memoryview:
        """Returns the contents of a part, whose frame has come, in memory of this process alone. Call it for each part with
        any."""
        ...

    def close(self, *, is_whole: bool) -> None:
        """Ends it.

        Args:
            is_whole: all parts have come, so the source will not write again.
        """
        ...


class KVOutbox(Protocol):
    """Where a source puts the contents of one pull."""

    def send(self, sock: socket.socket, frame: bytes, contents: Sequence[bytes], deadline_s: float) -> None:
        """Sends a part: its frame (`pack`), and its contents in order."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class StreamPath:
    """Contents that follow their frame on its socket (protocols `KVInbox` and `KVOutbox`)."""

    def invite(self, sock: socket.socket, deadline_s: float) -> None:
        """Nothing to do: the contents follow on the socket."""

    def receive(self, sock: socket.socket, num_bytes: int, deadline_s: float) -> memoryview:
        return memoryview(read_exactly(sock, num_bytes, deadline_s))

    def send(self, sock: socket.socket, frame: bytes, contents: Sequence[bytes], deadline_s: float) -> None:
        for piece in (frame, *contents):
            sock.settimeout(time_left(deadline_s))
            sock.sendall(piece)

    def close(self, *, is_whole: bool = True) -> None:
        """Nothing to do: the opener of the socket closes it."""


def pack(message: msgspec.Struct) -> bytes:
    """Returns the frame of a message."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def send_frame(sock: socket.socket, message: msgspec.Struct, deadline_s: float) -> None:
    """Sends one message. Raises OSError if the peer has left, or takes too long."""
    sock.settimeout(time_left(deadline_s))
    sock.sendall(pack(message))


def receive_frame(sock: socket.socket, decoder: msgspec.msgpack.Decoder[_M], max_bytes: int, deadline_s: float) -> _M:
    """Receives one message. Raises KVLinkError if it is too long, or the peer leaves."""
    (size,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size, deadline_s))
    if size > max_bytes:
        raise KVLinkError(f"a message of {size} bytes is over the limit of {max_bytes}")
    return decoder.decode(read_exactly(sock, size, deadline_s))


def read_exactly(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytearray:
    """Receives this many bytes. Raises KVPeerGoneError if the peer leaves before, TimeoutError if it takes too long."""
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        sock.settimeout(time_left(deadline_s))
        got = sock.recv_into(view[filled:])
        if not got:
            raise KVPeerGoneError("the peer has left")
        filled += got
    return buffer


def time_left(deadline_s: float) -> float:
    """Raises TimeoutError if there is none."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s
