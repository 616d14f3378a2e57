"""KV links inside a sealed node: every byte between two engines is sealed, under keys of this connection alone.

Both sides draw a key pair (X25519, RFC 7748) for one connection. Its two keys, one for each direction, are derived (HKDF, RFC
5869) from what they agree on, from both public keys, and from the secret of the node's engines: a peer that does not know the
secret, or has changed a public key, cannot open the first record. Records are sealed with AES-256-GCM; their number is the
nonce, their length is authenticated. The keys lie in locked memory and are wiped with the connection. So a recorded connection
cannot be opened later, not even with the secret.
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
from cloister.engine.kv_unit import (
    SEALED,
    SECRET_BYTES,
    CarriedSocket,
    LinkSocket,
    UnitListener,
    UnitPeers,
    UnitSeat,
    endpoint_of,
)
from cloister.engine.locked_keys import KEY_BYTES, LockedKeys, lock_keys
from cloister.types.errors import ConfigError

RECORD_BYTES: Final = 2**18
"""Largest content of a record: small enough to be in the processor's cache still when it is sent."""
PUBLIC_BYTES: Final = 32
"""Length of a side's public key, which it sends first."""
_TAG_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">I")
RECORD_HEAD_BYTES: Final = _LENGTH.size
_NONCE: Final = struct.Struct(">IQ")
_LABEL: Final = b"cloister/kv-link/1"


class LinkRecords:
    """Seals and opens for either side of one connection: the agreement on its keys, and its records. No I/O.

    Args:
        keys: locked memory, which holds the derived keys until `close`.
        is_source: this side accepted the connection.

    Attributes:
        public: this side's key, which the other one needs.
        is_agreed: whether there are keys.
    """

    def __init__(self, keys: LockedKeys, *, is_source: bool) -> None:
        self.is_agreed = False
        self._keys, self._is_source = keys, is_source
        self._private: X25519PrivateKey | None = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self._own = self._peers = 0
        self._num_sent = self._num_received = 0

    def agree(self, theirs: bytes, secret: bytes) -> None:
        """Derives the keys.

        Args:
            theirs: the other side's public key.
            secret: shared by both sides.

        Raises:
            KVLinkError: that is not a valid key.
        """
        assert self._private is not None, "a connection agrees once"
        asker, source = (theirs, self.public) if self._is_source else (self.public, theirs)
        try:
            agreed = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise KVLinkError("the other side sent a public key that nobody can have drawn") from None
        self._private = None
        derived = HKDF(hashes.SHA256(), 2 * KEY_BYTES, secret, _LABEL + asker + source).derive(agreed)
        of_asker, of_source = derived[:KEY_BYTES], derived[KEY_BYTES:]
        self._own = self._keys.put(of_source if self._is_source else of_asker)
        self._peers = self._keys.put(of_asker if self._is_source else of_source)
        self.is_agreed = True

    def seal(self, content: memoryview | bytes) -> bytes:
        """Returns a record; `content` has 1 to `RECORD_BYTES` bytes, or none in a heartbeat (`engine.heartbeats`)."""
        head = _LENGTH.pack(len(content) + _TAG_BYTES)
        sealed = self._cipher(self._own).encrypt(_NONCE.pack(0, self._num_sent), content, head)
        self._num_sent += 1
        return head + sealed

    def seal_all(self, content: bytes) -> bytes:
        """Returns the records of content of any length."""
        view = memoryview(content)
        return b"".join(self.seal(view[start : start + RECORD_BYTES]) for start in range(0, len(view), RECORD_BYTES))

    @staticmethod
    def read_head(head: bytes | bytearray, *, may_be_empty: bool = False) -> int:
        """Returns how many bytes follow a record's first `RECORD_HEAD_BYTES`. Raises KVLinkError for an invalid length."""
        (size,) = _LENGTH.unpack(head)
        if not _TAG_BYTES + (not may_be_empty) <= size <= RECORD_BYTES + _TAG_BYTES:
            raise KVLinkError(f"an engine never seals a record of {size} bytes")
        return int(size)

    def open(self, head: bytes | bytearray, sealed: bytes | bytearray) -> bytes:
        """Returns the content of the next record. Raises KVLinkError if the other side did not seal it as this one."""
        try:
            opened = self._cipher(self._peers).decrypt(_NONCE.pack(0, self._num_received), sealed, bytes(head))
        except InvalidTag:
            raise KVLinkError("a record was not sealed by the engine at the other end of this connection") from None
        self._num_received += 1
        return opened

    def open_next(self, received: bytearray) -> bytes | None:
        """Removes the next record from what came, and returns its content, which may be empty; None while it is not there yet.
        Raises as `open`."""
        if len(received) < RECORD_HEAD_BYTES:
            return None
        head = bytes(received[:RECORD_HEAD_BYTES])
        end = RECORD_HEAD_BYTES + self.read_head(head, may_be_empty=True)
        if len(received) < end:
            return None
        opened = self.open(head, bytes(received[RECORD_HEAD_BYTES:end]))
        del received[:end]
        return opened

    def close(self) -> None:
        """Wipes the keys."""
        if self.is_agreed:
            self._keys.forget(self._own)
            self._keys.forget(self._peers)

    def _cipher(self, number: int) -> AESGCM:
        cipher = self._keys.cipher(number)
        if cipher is None:
            raise ConnectionAbortedError("the connection was closed")
        return cipher


class SealedSocket(LinkSocket):
    """A connection whose content is sealed in both directions."""

    _records: LinkRecords | None = None
    _opened: memoryview

    @classmethod
    def shake_hands(
        cls, sock: socket.socket, keys: LockedKeys, secret: int, timeout_s: float, *, is_source: bool
    ) -> SealedSocket:
        """Takes a connection over, and agrees on keys with the other side.

        Args:
            secret: number in `keys` of the secret that the engines of the unit share.
            is_source: this side accepted the connection.

        Raises:
            OSError: the other side leaves, or takes too long.
        """
        link = cls(fileno=sock.detach())
        try:
            deadline_s = time.monotonic() + timeout_s
            link._opened = memoryview(b"")
            link._records = LinkRecords(keys, is_source=is_source)
            link.settimeout(max(timeout_s, 1e-3))
            socket.socket.sendall(link, link._records.public)
            theirs = bytes(_receive_plain(link, PUBLIC_BYTES, deadline_s))
            known = keys.copy(secret)
            if known is None:
                raise ConnectionAbortedError("the engine ends")
            link._records.agree(theirs, known)
        except BaseException:
            link.close()
            raise
        return link

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Seals and sends."""
        content = memoryview(data).cast("B")
        for start in range(0, len(content), RECORD_BYTES):
            super().sendall(self._agreed().seal(content[start : start + RECORD_BYTES]))

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Copies opened content, after reading another record if nothing is left of the last one. Returns 0 if the other side
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
        if self._records is not None:
            self._records.close()
            self._opened = memoryview(b"")
        super().close()

    def _open_record(self) -> bool:
        head = bytearray(_LENGTH.size)
        if not (num_read := super().recv_into(head)):
            return False
        deadline_s = time.monotonic() + (self.gettimeout() or 0.0)
        head[num_read:] = _receive_plain(self, len(head) - num_read, deadline_s)
        sealed = _receive_plain(self, LinkRecords.read_head(head), deadline_s)
        self._opened = memoryview(self._agreed().open(head, sealed))
        return True

    def _agreed(self) -> LinkRecords:
        assert self._records is not None, "`shake_hands` makes it"
        return self._records


def _receive_plain(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytearray:
    """Receives this many raw bytes of the connection. Raises as `kv_frames.read_exactly`."""
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
        secret: shared by them, and nobody else.
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
        return self._shake_hands(self._peers.connect(int(where)), timeout_s, is_source=False)

    def accept(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        return self._shake_hands(sock, timeout_s, is_source=True)

    def _shake_hands(self, sock: socket.socket, timeout_s: float, *, is_source: bool) -> socket.socket:
        if not isinstance(sock, CarriedSocket):
            return SealedSocket.shake_hands(sock, self._keys, self._secret, timeout_s, is_source=is_source)
        deadline_s = time.monotonic() + timeout_s
        with sock:  # its own secret: engines of two machines share no other
            secret = bytes(_receive_plain(sock, SECRET_BYTES, deadline_s))
            number = self._keys.put(secret)
            try:
                link = SealedSocket.shake_hands(sock, self._keys, number, time_left(deadline_s), is_source=is_source)
                link.secret = secret
                return link
            finally:
                self._keys.forget(number)

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
