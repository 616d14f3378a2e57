"""Contents of KV that pass through Mooncake's transfer engine (decisions/0050).

Mooncake writes from registered memory of one process into registered memory of another. It authenticates nobody, encrypts
nothing, and listens on all addresses of the machine. So registered memory only ever holds ciphertext: parts are sealed with
AES-256-GCM under a key that the asking engine draws for each pull and sends over the connection between both. It opens a copy.

A write that is late cannot be called back: it may read and write registered memory at any time after. Memory of such a pull
stays registered and is not used again for a while (`QUARANTINE_S`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.engine.kv_frames import MAX_HALF_BYTES, KVLinkError, pack, read_exactly, receive_frame, time_left
from cloister.types.errors import ConfigError
from cloister.types.extras import install_command

ADDRESS: Final = "127.0.0.1"
NUM_MEMORIES: Final = 24
"""Pieces of memory that an engine registers at most, of all sizes; 8 pulls and 16 engines that are served use one each."""
QUARANTINE_S: Final = 60.0
"""Memory of a pull that broke off is reused after this time. A write that comes even later spoils a part of another pull,
which does not open then, so that its KV is computed."""
_TAG_BYTES: Final = 16
_MAX_INVITATION_BYTES: Final = 4096
_READ: Final = b"\x06"
"""Tells the source that one more part was read."""
_SHORTEST_NAP_S: Final = 50e-6
_LONGEST_NAP_S: Final = 1e-3


class _Invitation(msgspec.Struct, frozen=True, array_like=True):
    """Where a source writes, and under which key.

    Attributes:
        session: of the Mooncake of the engine that asks.
        address: of its memory.
        half_bytes: of each half.
    """

    session: str
    address: int
    half_bytes: int
    key: bytes

    def __repr__(self) -> str:
        """Shows no key."""
        return f"_Invitation(half_bytes={self.half_bytes})"


_INVITATION: Final = msgspec.msgpack.Decoder(_Invitation)


class RegisteredHalves:
    """Two halves of memory that Mooncake reads and writes. It stays registered: a late write may come at any time.

    Args:
        mooncake: which registers it.
        half_bytes: size of each.

    Raises:
        OSError: Mooncake does not register it.
    """

    def __init__(self, mooncake: Any, half_bytes: int) -> None:
        self.half_bytes = half_bytes
        self._map = mmap.mmap(-1, 2 * half_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if mooncake.register_memory(self.address, 2 * half_bytes) != 0:
            raise OSError("Mooncake does not register memory")

    def copy(self, half: int, num_bytes: int) -> bytes:
        """Returns what lies in a half."""
        return self._map[half * self.half_bytes : half * self.half_bytes + num_bytes]

    def put(self, half: int, sealed: bytes) -> None:
        """Writes a half."""
        self._map[half * self.half_bytes : half * self.half_bytes + len(sealed)] = sealed


class Mooncake:
    """The transfer engine of this process, and the memory that it knows.

    Args:
        engine: a `mooncake.engine.TransferEngine` that was started.
        session: the name under which others reach it.
        clock: seconds that only grow.
    """

    def __init__(self, engine: Any, session: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self.session, self._clock = engine, session, clock
        self._idle: list[RegisteredHalves] = []
        self._made: list[RegisteredHalves] = []  # also memory that is no longer used: a late write must find it
        self._set_aside: list[tuple[float, RegisteredHalves]] = []  # when, oldest first
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> Mooncake:
        """Starts it. Raises ConfigError if it is not installed, or does not start."""
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it logs addresses of memory
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                f"kv_transfer mooncake needs an extra, {install_command('mooncake')}, and a library of the system, libibverbs"
                f" (Debian: apt install libibverbs1): {error}",
                param="kv_transfer",
            ) from error
        engine = TransferEngine()
        if engine.initialize(ADDRESS, "P2PHANDSHAKE", "tcp", "") != 0:
            raise ConfigError("Mooncake's transfer engine does not start; its log says why", param="kv_transfer")
        return cls(engine, f"{ADDRESS}:{engine.get_rpc_port()}")

    def take(self, half_bytes: int) -> RegisteredHalves:
        """Returns memory that is free. Raises OSError if there is none, because late writes may still use it."""
        with self._lock:
            while self._set_aside and self._clock() - self._set_aside[0][0] >= QUARANTINE_S:
                self._idle.append(self._set_aside.pop(0)[1])
            for at, halves in enumerate(self._idle):
                if halves.half_bytes == half_bytes:
                    return self._idle.pop(at)
            if len(self._made) == NUM_MEMORIES:
                raise OSError(
                    f"transfers that did not end hold all memory that Mooncake may use, for {QUARANTINE_S:g} s each; "
                    "the engine computes KV"
                )
            self._made.append(RegisteredHalves(self.engine, half_bytes))
            return self._made[-1]

    def give_back(self, halves: RegisteredHalves) -> None:
        """Takes back memory that no write can still use."""
        with self._lock:
            self._idle.append(halves)

    def set_aside(self, halves: RegisteredHalves) -> None:
        """Takes back memory that a late write may still use."""
        with self._lock:
            self._set_aside.append((self._clock(), halves))

    def write(self, session: str, source: int, target: int, num_bytes: int, deadline_s: float) -> None:
        """Writes memory of this process into that of another one.

        Raises:
            TimeoutError: it was not done in time, and may still happen.
            KVLinkError: it failed.
        """
        batch, nap_s = self.engine.transfer_submit_write(session, source, target, num_bytes), _SHORTEST_NAP_S
        if batch == 0:
            raise KVLinkError("Mooncake does not reach another engine")
        while (status := self.engine.transfer_check_status(batch)) == 0:
            time.sleep(min(nap_s, time_left(deadline_s)))
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        if status < 0:
            raise KVLinkError("Mooncake could not write to another engine")


class MooncakeInbox:
    """The end of the engine that asks (protocol `engine.kv_frames.KVInbox`).

    Args:
        part_bytes: contents of a part at most.
    """

    def __init__(self, mooncake: Mooncake, part_bytes: int) -> None:
        self._mooncake, self._halves = mooncake, mooncake.take(part_bytes + _TAG_BYTES)
        self._key, self._num_parts = secrets.token_bytes(32), 0
        self._cipher = AESGCM(self._key)

    def invite(self, sock: socket.socket, deadline_s: float) -> None:
        invitation = _Invitation(self._mooncake.session, self._halves.address, self._halves.half_bytes, self._key)
        sock.settimeout(time_left(deadline_s))
        sock.sendall(pack(invitation))

    def receive(self, sock: socket.socket, num_bytes: int, deadline_s: float) -> memoryview:
        sealed = self._halves.copy(self._num_parts % 2, num_bytes + _TAG_BYTES)
        try:
            opened = self._cipher.decrypt(_nonce(self._num_parts), sealed, None)
        except InvalidTag as error:
            raise KVLinkError("what came through Mooncake is not what another engine has sent") from error
        self._num_parts += 1
        sock.settimeout(time_left(deadline_s))
        with contextlib.suppress(ConnectionError):  # it was the last part, and the source has left
            sock.sendall(_READ)
        return memoryview(opened)

    def close(self, *, is_whole: bool) -> None:
        (self._mooncake.give_back if is_whole else self._mooncake.set_aside)(self._halves)


class MooncakeOutbox:
    """The end of the source (protocol `engine.kv_frames.KVOutbox`).

    Args:
        sock: of the engine that asks, which says now where to write.

    Raises:
        KVLinkError: it says something else.
    """

    def __init__(self, mooncake: Mooncake, sock: socket.socket, deadline_s: float) -> None:
        self._invitation = receive_frame(sock, _INVITATION, _MAX_INVITATION_BYTES, deadline_s)
        if not (_TAG_BYTES < self._invitation.half_bytes <= MAX_HALF_BYTES and len(self._invitation.key) == 32):
            raise KVLinkError("an engine asked for KV in memory of an odd size")
        self._mooncake, self._cipher = mooncake, AESGCM(self._invitation.key)
        self._halves, self._num_parts, self._is_written = mooncake.take(self._invitation.half_bytes), 0, True

    def send(self, sock: socket.socket, frame: bytes, contents: Sequence[bytes], deadline_s: float) -> None:
        if any(contents):
            if self._num_parts >= 2:
                read_exactly(sock, len(_READ), deadline_s)  # of the part before the last: its half is free
            self._write(b"".join(contents), deadline_s)
        sock.settimeout(time_left(deadline_s))
        sock.sendall(frame)

    def _write(self, content: bytes, deadline_s: float) -> None:
        half_bytes, half = self._invitation.half_bytes, self._num_parts % 2
        if len(content) + _TAG_BYTES > half_bytes:
            raise KVLinkError("a part is larger than the memory that an engine has for it")
        sealed = self._cipher.encrypt(_nonce(self._num_parts), content, None)
        self._halves.put(half, sealed)
        offset, self._is_written = half * half_bytes, False
        self._mooncake.write(
            self._invitation.session,
            self._halves.address + offset,
            self._invitation.address + offset,
            len(sealed),
            deadline_s,
        )
        self._is_written, self._num_parts = True, self._num_parts + 1

    def close(self) -> None:
        (self._mooncake.give_back if self._is_written else self._mooncake.set_aside)(self._halves)


def _nonce(part: int) -> bytes:
    """Returns the nonce of a part, which no other one under its key has."""
    return part.to_bytes(12, "big")
