"""Messages between front and engine: frames of msgpack over a stream socket, never pickle, and the queue of the unread ones.

A frame is four bytes of length, big-endian, and that many bytes of one message. The protocol consists of the types of
`types.events`; any other frame ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_unit import UnitSeat
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError
from cloister.types.events import EngineMessage, FrontMessage

READ_LIMIT_BYTES: Final = 2**20
MAX_FRAME_BYTES: Final = 256 * 2**20
"""Maximum message size in both directions: prompt log-probabilities of 128k tokens, with a margin."""

MAX_BOOT_DESCRIPTORS: Final = 5
"""A pipe for stacks, a listener, two of `kv_unit` and one of `kv_pool`."""
_LENGTH: Final = struct.Struct(">I")
HEAD_BYTES: Final = _LENGTH.size


class ChannelError(CloisterError):
    """The peer sent an invalid message, or a message is too long to send."""

    code = "channel_error"


class Boot(msgspec.Struct, frozen=True, tag=True):
    """The first message to an engine process: how to build its engine.

    Attributes:
        entry: "module:function"; the function takes the configuration and returns an EngineCore.
        import_path: the front's `sys.path`, so that both sides import the same code.
        log_format: the front's log format, which the engine uses too.
        kv_secret: shared by all engines that exchange KV, and nobody else; None: this engine does not exchange KV.
        replica: its index among several replicas, for the log; None: it is the only engine.
        is_restart: an engine before this one was ready, so a KV tier that can no longer be used is left out.
        kv_unit: its seat among the engines of a sealed node that exchange KV, whose two descriptors come along; None: it has
            none.
        kv_pool: its seat in the memory that engines share for KV, whose descriptor is the last one that comes along; None: it
            has none.
    """

    entry: str
    config: EngineConfig
    import_path: list[str]
    log_format: str = "text"
    kv_secret: bytes | None = None
    is_restart: bool = False
    replica: int | None = None
    kv_unit: UnitSeat | None = None
    kv_pool: PoolSeat | None = None

    def __repr__(self) -> str:
        """Shows no secret."""
        return f"Boot(entry={self.entry!r})"


encode: Final[Callable[[Boot | FrontMessage | EngineMessage], bytes]] = msgspec.msgpack.Encoder().encode
decode_boot: Final[Callable[[bytes], Boot]] = msgspec.msgpack.Decoder(Boot).decode
decode_front: Final[Callable[[bytes], FrontMessage]] = msgspec.msgpack.Decoder(FrontMessage).decode
decode_engine: Final[Callable[[bytes], EngineMessage]] = msgspec.msgpack.Decoder(EngineMessage).decode


def frame(message: Boot | FrontMessage | EngineMessage) -> bytes:
    """Returns a message as bytes to send.

    Raises:
        ChannelError: the message is longer than `MAX_FRAME_BYTES`.
    """
    return frame_bytes(encode(message))


def frame_bytes(payload: bytes) -> bytes:
    """As `frame`, for a message that is encoded already."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"a message of {len(payload)} bytes is over the channel's limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """Reads one frame's payload; None if the peer closed the connection, even in the middle of a frame.

    Raises:
        ChannelError: the frame declares more than `MAX_FRAME_BYTES`.
    """
    try:
        return await reader.readexactly(payload_size(await reader.readexactly(HEAD_BYTES)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def wait_readable(sock: socket.socket) -> None:
    """Waits until a socket has something to read, or has ended: for messages that come with descriptors."""
    loop = asyncio.get_running_loop()
    is_readable = loop.create_future()
    loop.add_reader(sock, lambda: None if is_readable.done() else is_readable.set_result(None))
    try:
        await is_readable
    finally:
        loop.remove_reader(sock)


class MessageStream:
    """The front's end of a channel, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> MessageStream:
        """Takes over a connected socket, and closes it."""
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=READ_LIMIT_BYTES))

    def send(self, message: FrontMessage) -> None:
        """Sends a message without blocking. If the engine has ended, the message is lost and `receive` returns None.

        Raises:
            ChannelError: the message is too long.
        """
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> EngineMessage | None:
        """Returns the next message; None if the engine has ended or sent an invalid message."""
        try:
            payload = await receive(self._reader)
            return None if payload is None else decode_engine(payload)
        except (ChannelError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        """Closes this end; `receive` then returns None."""
        self._writer.close()


def receive_boot(sock: socket.socket) -> tuple[bytes | None, list[int]]:
    """Like `receive_blocking`, for the first frame, which carries descriptors: a pipe for stacks, and perhaps a listener,
    sockets to other engines and memory for KV."""
    while True:
        try:
            head, descriptors, _, _ = socket.recv_fds(sock, HEAD_BYTES, MAX_BOOT_DESCRIPTORS)
        except TimeoutError:
            continue
        if len(head) < HEAD_BYTES:
            return None, descriptors
        return _read_exactly(sock, payload_size(head)), descriptors


def receive_blocking(sock: socket.socket) -> bytes | None:
    """Like `receive`, but blocks until the peer sends or closes."""
    head = _read_exactly(sock, HEAD_BYTES)
    return None if head is None else _read_exactly(sock, payload_size(head))


def payload_size(head: bytes | bytearray) -> int:
    """Returns the message length declared by a frame's first `HEAD_BYTES` bytes.

    Raises:
        ChannelError: the length is over `MAX_FRAME_BYTES`.
    """
    size: int = _LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {size} bytes is over the channel's limit of {MAX_FRAME_BYTES}")
    return size


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        try:
            got = sock.recv_into(view[filled:])
        except TimeoutError:  # the socket's timeout applies to sending only; receiving waits without limit
            continue
        except OSError:
            return None
        if got == 0:
            return None
        filled += got
    return bytes(buffer)


class InputQueue:
    """The front's messages from any thread to the engine's thread, which reads all of them between two steps."""

    def __init__(self) -> None:
        self._messages: list[FrontMessage] = []
        self._is_woken = False
        self._arrived = threading.Condition()

    def put(self, message: FrontMessage) -> None:
        """Adds a message and wakes the engine."""
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def wake(self) -> None:
        """Wakes the engine without a message, when something that it waits for is done."""
        with self._arrived:
            self._is_woken = True
            self._arrived.notify()

    def take(self) -> list[FrontMessage]:
        """Removes and returns all messages, oldest first."""
        with self._arrived:
            messages, self._messages = self._messages, []
            self._is_woken = False
        return messages

    def wait(self, timeout_s: float) -> None:
        """Waits until a message arrives, the engine is woken, or `timeout_s` has passed."""
        with self._arrived:
            if not (self._messages or self._is_woken):
                self._arrived.wait(timeout_s)
