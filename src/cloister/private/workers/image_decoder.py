"""Decodes the images of one sealed request, in a child of its worker. No process of a sealed node executes a program, so it is
forked, before the request is opened: it has nothing of it, and of all descriptors one socket.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from contextlib import suppress
from typing import Final

from cloister.server.confinement import bound_resources, confine
from cloister.server.image_child import CPU_S, HEAD, MAX_IMAGE_PIXELS, MEMORY_BYTES, answer_file, load_readers
from cloister.server.image_decoding import DEADLINE_S
from cloister.trust import hardening
from cloister.types.processes import name_process

_LENGTH: Final = struct.Struct(">I")
_LEFT: Final = struct.Struct(">Q")
MAX_ANSWER_BYTES: Final = HEAD.size + 3 * MAX_IMAGE_PIXELS
_MAX_DESCRIPTORS: Final = 1 << 16


class ForkedDecoder:
    """The process of one request. Make it while its readers can still be loaded, `fork` it in the worker."""

    def __init__(self) -> None:
        load_readers()
        self._sock: socket.socket | None = None
        self._pid = 0

    def fork(self) -> None:
        """Forks the process. This one must have a single thread."""
        near, far = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_decoder(far, parent)
        far.close()
        near.settimeout(DEADLINE_S)
        self._sock, self._pid = near, pid

    def open(self) -> ForkedDecoding:
        """Begins to decode a file (`server.image_decoding.Decoding`)."""
        return ForkedDecoding(self._sock, self._pid)


class ForkedDecoding:
    """A file in the process; the next one begins when this one is done."""

    def __init__(self, sock: socket.socket | None, pid: int) -> None:
        self._sock = sock
        self._pid = pid
        self._is_done = False

    def run(self, data: bytes) -> bytes:
        """Returns what the process answers; nothing where it has ended.

        Raises:
            TimeoutError: it took too long.
        """
        if self._sock is None:
            return b""
        try:
            self._sock.sendall(_LENGTH.pack(len(data)))
            self._sock.sendall(data)
            num_bytes = _LEFT.unpack(_receive(self._sock, _LEFT.size))[0]
            if num_bytes > MAX_ANSWER_BYTES:  # whatever a file has made of the process
                return b""
            answer = _receive(self._sock, num_bytes)
        except TimeoutError:
            raise
        except (OSError, EOFError):
            return b""
        self._is_done = True
        return answer

    def stop(self) -> None:
        """Ends the process if it is at this file, or has failed with it."""
        if not self._is_done and self._pid:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)


def _become_decoder(sock: socket.socket, parent: int) -> None:
    """Decodes files until the worker has ended; never returns."""
    try:
        os.closerange(0, sock.fileno())
        os.closerange(sock.fileno() + 1, _MAX_DESCRIPTORS)
        name_process("image")
        bound_resources(CPU_S, _count_address_space() + MEMORY_BYTES)
        if not confine(parent) and hardening.sealed() is not None:
            os._exit(1)  # in a sealed node every measure holds
        while True:
            data = _receive(sock, _LENGTH.unpack(_receive(sock, _LENGTH.size))[0])
            answer = b"".join(answer_file(data))
            sock.sendall(_LEFT.pack(len(answer)) + answer)
    except BaseException:  # its message may be content
        os._exit(1)


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Returns the next bytes.

    Raises:
        EOFError: the other side has ended.
    """
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        got = sock.recv_into(view[filled:])
        if not got:
            raise EOFError
        filled += got
    return bytes(buffer)


def _count_address_space() -> int:
    """Returns the bytes of address space that this process has from its zygote."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
