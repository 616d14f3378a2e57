"""KV links inside a sealed node: every byte between two engines is sealed, under keys of this connection alone.

Both sides draw a key pair (X25519, RFC 7748) for one connection. Its two keys, one for each direction, are derived (HKDF, RFC
5869) from what they agree on, from both public keys, and from the secret of the node's engines: who does not know it, or has
changed a public key, cannot open what comes first. Records are sealed with AES-256-GCM; their number is the nonce, their length
is authenticated. The keys lie in locked memory and are wiped with the connection. So who has recorded a connection can open
none of it later, not even with the secret.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Any, ClassVar, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.engine.kv_frames import KVInbox, KVLinkError, KVOutbox, KVPeerGoneError, StreamPath, time_left
from cloister.engine.kv_unit import SEALED, UnitListener, UnitPeers, UnitSeat, endpoint_of
from cloister.engine.locked_keys import KEY_BYTES, LockedKeys, lock_keys
from cloister.types.errors import ConfigError

RECORD_BYTES: Final = 2**18
"""Largest content of a record: what was sealed is still in the processor's cache when it is sent."""
_PUBLIC_BYTES: Final = 32
_TAG_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">I")
_NONCE: Final = struct.Struct(">IQ")
_LABEL: Final = b"cloister/kv-link/1"


class SealedSocket(socket.socket):
    """A connection whose content is sealed in both directions.

    Attributes:
        keys: locked memory; two numbers of it are this connection's until it is closed.
    """

    _keys: LockedKeys
    _own: int
    _peers: int

    @classmethod
    def shake_hands(
        cls, sock: socket.socket, keys: LockedKeys, secret: int, timeout_s: float, *, is_source: bool
    ) -> SealedSocket:
        """Takes a connection over, and agrees on keys with the other side.

        Args:
            secret: number in `keys` of what the engines of the unit know.
            is_source: this side accepted the connection.

        Raises:
            OSError: the other side leaves, or takes too long.
        """
        link = cls(fileno=sock.detach())
        try:
            deadline_s = time.monotonic() + timeout_s
            private = X25519PrivateKey.generate()
            own = private.public_key().public_bytes_raw()
            link.settimeout(max(timeout_s, 1e-3))
            socket.socket.sendall(link, own)
            theirs = bytes(_receive_plain(link, _PUBLIC_BYTES, deadline_s))
            asker, source = (theirs, own) if is_source else (own, theirs)
            try:
                agreed = private.exchange(X25519PublicKey.from_public_bytes(theirs))
            except ValueError:
                raise KVLinkError("another engine sent a public key that nobody can have drawn") from None
            known = keys.copy(secret)
            if known is None:
                raise ConnectionAbortedError("the engine ends")
            derive = HKDF(hashes.SHA256(), 2 * KEY_BYTES, known, _LABEL + asker + source)
            derived = derive.derive(agreed)
            link._begin(keys, derived[:KEY_BYTES], derived[KEY_BYTES:], is_source=is_source)
        except BaseException:
            link.close()
            raise
        return link

    def _begin(self, keys: LockedKeys, of_asker: bytes, of_source: bytes, *, is_source: bool) -> None:
        self._keys = keys
        self._own = keys.put(of_source if is_source else of_asker)
        self._peers = keys.put(of_asker if is_source else of_source)
        self._num_sent = self._num_received = 0
        self._opened = memoryview(b"")

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Seals and sends."""
        content = memoryview(data).cast("B")
        for start in range(0, len(content), RECORD_BYTES):
            piece = content[start : start + RECORD_BYTES]
            head = _LENGTH.pack(len(piece) + _TAG_BYTES)
            sealed = self._cipher(self._own).encrypt(_NONCE.pack(0, self._num_sent), piece, head)
            self._num_sent += 1
            super().sendall(head + sealed)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Copies what was opened, after another record if there is nothing left of the last one. Returns 0 if the other side
        has left between two records.

        Raises:
            KVLinkError: a record is not what the other side sealed, or is cut off.
        """
        view = memoryview(buffer).cast("B")
        if not self._opened and not self._open_record():
            return 0
        taken = self._opened[: min(len(view), nbytes or len(view))]
        view[: len(taken)] = taken
        self._opened = self._opened[len(taken) :]
        return len(taken)

    def close(self) -> None:
        """Ends the connection, and wipes its keys."""
        keys: LockedKeys | None = getattr(self, "_keys", None)
        if keys is not None:
            keys.forget(self._own)
            keys.forget(self._peers)
            self._opened = memoryview(b"")
        super().close()

    def _open_record(self) -> bool:
        head = bytearray(_LENGTH.size)
        if not (num_read := super().recv_into(head)):
            return False
        deadline_s = time.monotonic() + (self.gettimeout() or 0.0)
        head[num_read:] = _receive_plain(self, len(head) - num_read, deadline_s)
        (size,) = _LENGTH.unpack(head)
        if not _TAG_BYTES < size <= RECORD_BYTES + _TAG_BYTES:
            raise KVLinkError(f"a record of {size} bytes is none that an engine seals")
        sealed = _receive_plain(self, size, deadline_s)
        try:
            opened = self._cipher(self._peers).decrypt(_NONCE.pack(0, self._num_received), sealed, bytes(head))
        except InvalidTag:
            raise KVLinkError("a record was not sealed by the engine at the other end of this connection") from None
        self._num_received += 1
        self._opened = memoryview(opened)
        return True

    def _cipher(self, number: int) -> AESGCM:
        cipher = self._keys.cipher(number)
        if cipher is None:
            raise ConnectionAbortedError("the connection was closed")
        return cipher


def _receive_plain(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytearray:
    """Receives so many bytes as they are on the connection. Raises as `kv_frames.read_exactly`."""
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        sock.settimeout(time_left(deadline_s))
        got = socket.socket.recv_into(sock, view[filled:])
        if not got:
            raise KVPeerGoneError("the peer has left")
        filled += got
    return buffer


def _load_ciphers() -> None:
    """Does once what connections do: the library imports parts of itself at first use, and an engine of a sealed node may
    import nothing once it is locked down."""
    private = X25519PrivateKey.generate()
    public = X25519PublicKey.from_public_bytes(private.public_key().public_bytes_raw())
    cipher = AESGCM(HKDF(hashes.SHA256(), KEY_BYTES, b"salt", _LABEL).derive(private.exchange(public)))
    with contextlib.suppress(InvalidTag):
        cipher.decrypt(_NONCE.pack(0, 1), cipher.encrypt(_NONCE.pack(0, 0), b"", b""), b"")


_load_ciphers()


class SealedKVTransport:
    """Connections between the engines of one sealed node (protocol `engine.kv_transports.KVTransport`).

    Args:
        secret: what they know, and nobody else.
        seat: which of them this is.
        listener, news: its descriptors (`engine.kv_unit`).

    Raises:
        ConfigError: no memory may be locked.
    """

    name: ClassVar = SEALED

    def __init__(self, secret: bytes, seat: UnitSeat, listener: socket.socket, news: socket.socket) -> None:
        self._keys = lock_keys("kv_transfer")
        self._secret = self._keys.put(secret)
        self._seat, self._listener, self._peers = seat, UnitListener.adopt(listener), UnitPeers(news)

    def listen(self, where: str) -> tuple[socket.socket, str]:
        if where:
            raise ConfigError("kv_transfer sealed takes no address; engines of a sealed node have none", param="kv_transfer")
        return self._listener, endpoint_of(self._seat.index)

    def connect(self, where: str, timeout_s: float) -> socket.socket:
        if not where.isdigit():
            raise ConnectionRefusedError("an engine of a sealed node has a number")
        sock = self._peers.connect(int(where))
        return SealedSocket.shake_hands(sock, self._keys, self._secret, timeout_s, is_source=False)

    def accept(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        return SealedSocket.shake_hands(sock, self._keys, self._secret, timeout_s, is_source=True)

    def open_inbox(self, where: str, part_bytes: int) -> KVInbox:
        return StreamPath()

    def open_outbox(self, sock: socket.socket, deadline_s: float) -> KVOutbox:
        return StreamPath()

    def close(self) -> None:
        """Wipes the secret, and the keys of connections that are open."""
        self._peers.close()
        with contextlib.suppress(OSError):
            self._listener.close()
        self._keys.clear()
