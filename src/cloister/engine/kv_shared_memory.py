"""Contents of KV that pass through memory of two engines on one machine (decisions/0050).

The asking engine owns the memory and sends its descriptor over the connection. The source writes one half while the other half
is read and checked. Whatever it writes after that is not read: what is checked is a copy. The memory has no name, so it is gone
with the last process that has it. The asking engine keeps some memory for its next pulls from the same source. That source
therefore sees nothing in it but what it wrote itself; between two pulls it is zero.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from typing import Final

from cloister.engine.kv_frames import MAX_HALF_BYTES, KVLinkError, read_exactly, time_left

NUM_IDLE: Final = 4
"""Memories that an engine keeps between pulls. Getting pages from the system costs more than writing them."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ: Final = b"\x06"
"""Tells the source that one more part was read."""


class SharedHalves:
    """Two halves of memory that another process can write, and which cannot change its length.

    Args:
        half_bytes: size of each.

    Raises:
        OSError: there is no such memory.
    """

    def __init__(self, half_bytes: int) -> None:
        self.half_bytes = half_bytes
        self.fd = os.memfd_create("cloister-kv-pull", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, 2 * half_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, 2 * half_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._num_written = [0, 0]

    def copy(self, half: int, num_bytes: int) -> bytes:
        """Returns what the source wrote into a half."""
        self._num_written[half] = max(self._num_written[half], num_bytes)
        start = half * self.half_bytes
        return self._map[start : start + num_bytes]

    def wipe(self) -> None:
        """Overwrites what was copied."""
        for half, num_bytes in enumerate(self._num_written):
            start = half * self.half_bytes
            self._map[start : start + num_bytes] = bytes(num_bytes)
        self._num_written = [0, 0]

    def close(self) -> None:
        """Gives back this process's hold on the memory."""
        self._map.close()
        os.close(self.fd)


class SharedMemories:
    """Memory that pulls of one engine reuse, by the source that has written it."""

    def __init__(self) -> None:
        self._idle: list[tuple[str, SharedHalves]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def take(self, source: str, half_bytes: int) -> SharedHalves:
        """Returns memory that is zero and that no other source has."""
        with self._lock:
            for at, (name, halves) in enumerate(self._idle):
                if name == source and halves.half_bytes == half_bytes:
                    return self._idle.pop(at)[1]
        return SharedHalves(half_bytes)

    def give_back(self, source: str, halves: SharedHalves) -> None:
        """Keeps memory that its source will not write until it is taken again."""
        halves.wipe()
        with self._lock:
            self._idle.append((source, halves))
            oldest = self._idle.pop(0)[1] if len(self._idle) > NUM_IDLE or self._is_closed else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Gives back memory that no pull uses; the rest follows when its pulls end."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for _, halves in idle:
            halves.close()


class SharedInbox:
    """The end of the engine that asks (protocol `engine.kv_frames.KVInbox`).

    Args:
        source: name of the endpoint that is asked.
        half_bytes: the largest part.
    """

    def __init__(self, memories: SharedMemories, source: str, half_bytes: int) -> None:
        self._memories, self._source = memories, source
        self._halves = memories.take(source, half_bytes)
        self._num_parts = 0

    def invite(self, sock: socket.socket, deadline_s: float) -> None:
        sock.settimeout(time_left(deadline_s))
        socket.send_fds(sock, [_READ], [self._halves.fd])

    def receive(self, sock: socket.socket, num_bytes: int, deadline_s: float) -> memoryview:
        if num_bytes > self._halves.half_bytes:
            raise KVLinkError("another engine says that it has written more than there is room for")
        copy = self._halves.copy(self._num_parts % 2, num_bytes)
        self._num_parts += 1
        sock.settimeout(time_left(deadline_s))
        with contextlib.suppress(ConnectionError):  # it was the last part, and the source has left
            sock.sendall(_READ)
        return memoryview(copy)

    def close(self, *, is_whole: bool) -> None:
        if is_whole:
            self._memories.give_back(self._source, self._halves)
        else:
            self._halves.close()  # the source may write it at any time


class SharedOutbox:
    """The end of the source (protocol `engine.kv_frames.KVOutbox`).

    Args:
        sock: of the engine that asks, which sends its memory now.

    Raises:
        KVLinkError: it sends something else.
    """

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        sock.settimeout(time_left(deadline_s))
        _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise KVLinkError("an engine asked for KV in shared memory, and sent none")
        try:
            # only files in memory have seals, so a write never waits for a disk or another process
            seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS:
                raise KVLinkError("an engine sent memory that can change its length")
            num_bytes = os.fstat(fds[0]).st_size
            if num_bytes > 2 * MAX_HALF_BYTES:
                raise KVLinkError("an engine sent more memory than a part of KV can need")
            self._map = mmap.mmap(fds[0], num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            raise KVLinkError("an engine sent something that is not shared memory") from error
        finally:
            os.close(fds[0])
        self._half_bytes, self._num_parts = num_bytes // 2, 0

    def send(self, sock: socket.socket, frame: bytes, contents: Sequence[bytes], deadline_s: float) -> None:
        num_bytes = sum(map(len, contents))
        if num_bytes > self._half_bytes:
            raise KVLinkError("a part is larger than the memory that an engine sent for it")
        if num_bytes:
            if self._num_parts >= 2:
                read_exactly(sock, len(_READ), deadline_s)  # of the part before the last: its half is free
            start = self._num_parts % 2 * self._half_bytes
            for content in contents:
                self._map[start : start + len(content)] = content
                start += len(content)
            self._num_parts += 1
        sock.settimeout(time_left(deadline_s))
        sock.sendall(frame)

    def close(self) -> None:
        self._map.close()
