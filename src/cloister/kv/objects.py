"""KV objects: self-describing, authenticated blocks of one entry of a block table. Pure: no I/O, no clock, no arrays.

An object is found by its prefix key, which covers the scope, the model, the adapter and all tokens up to its end. The transport
need not be trusted: nobody can make or change an object without the engines' key. An object that does not match is a miss, and
its positions are computed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

_NONCE: Final = bytes(12)
"""One nonce for all: what is hashed under it stays here."""


class KVHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Description of an object.

    Attributes:
        format: digest of the `KVFormat` that its contents have.
        root: root of its chain: the scope and the adapter (`PrefixKeys.root`).
        key: its prefix key.
        entry: number of its entry; it begins at position `entry * block_size`.
        sizes: bytes of its block of each group of layers; 0 where it has none.
    """

    format: bytes
    root: bytes
    key: bytes
    entry: int
    sizes: tuple[int, ...]


class KVObject(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a block table, on its way from one engine to another.

    Attributes:
        contents: of its block of each group of layers (`Program.export_blocks`), or of a snapshot of the state; empty where it
            has none.
        mac: over the header and the contents (`KVSealer`).
    """

    header: KVHeader
    contents: tuple[bytes, ...]
    mac: bytes

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"KVObject(entry={self.header.entry}, sizes={self.header.sizes})"

    @property
    def num_bytes(self) -> int:
        """Bytes of its contents."""
        return sum(self.header.sizes)


class RestoredEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a block table, from a tier of this engine or from another engine, which was checked.

    Attributes:
        contents: as in `KVObject`; in memory that is used again when nothing refers to it.
    """

    header: KVHeader
    contents: tuple[bytes | memoryview, ...]

    def __repr__(self) -> str:
        """Shows no content."""
        return f"RestoredEntry(entry={self.header.entry}, sizes={self.header.sizes})"

    @property
    def num_bytes(self) -> int:
        """Bytes of its contents."""
        return sum(self.header.sizes)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What two engines must have in common to read each other's KV.

    Attributes:
        fingerprint: model, number formats, numerics and back end (`ModelInfo.fingerprint`).
        block_size: positions in an entry.
        layout: which layers each group has, and what their queries see.
        sizes: bytes of a block of each group.
    """

    fingerprint: str
    block_size: int
    layout: str
    sizes: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """Returns 32 bytes that no other format has."""
        return hashlib.sha256(b"cloister/kv/1\0" + msgspec.msgpack.encode(_fields(self))).digest()


def _fields(form: KVFormat) -> tuple[str, int, str, tuple[int, ...]]:
    return form.fingerprint, form.block_size, form.layout, form.sizes


class KVSealer:
    """Makes objects, and checks those of others.

    A MAC is HMAC-SHA256 of the header and of a hash of each content: its GMAC under a second key and one nonce, which nobody
    sees. To hash with a secret key, and then to apply a pseudorandom function, needs no nonce of its own (Wegman and Carter
    1981); two contents of a MiB have the same GMAC with a chance of 2^-112 (McGrew and Viega 2004), and it takes an eighth of
    the time of SHA-256, or less.

    Args:
        form: the format of this engine.
        key: secret of the engines that exchange KV.
    """

    def __init__(self, form: KVFormat, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # only where KV moves: the import takes its time

        self._format, self._sizes = form.digest, form.sizes
        self._key = hmac.digest(key, b"objects", "sha256")
        self._hash = AESGCM(hmac.digest(key, b"contents", "sha256"))

    def seal(self, root: bytes, key: bytes, entry: int, contents: tuple[bytes, ...]) -> KVObject:
        """Returns an object with these contents."""
        header = KVHeader(self._format, root, key, entry, tuple(len(content) for content in contents))
        return KVObject(header, contents, self._authenticate(header, contents))

    def is_genuine(self, found: KVObject, root: bytes, keys: list[bytes]) -> bool:
        """Whether an object is what was asked for, and made by an engine that knows the secret.

        Args:
            keys: prefix keys of the request, by entry.
        """
        return self.is_wanted(found.header, root, keys) and self.is_authentic(found.header, found.contents, found.mac)

    def is_wanted(self, header: KVHeader, root: bytes, keys: list[bytes]) -> bool:
        """Whether a header says what was asked for: this format, scope and adapter, and the key of its entry. Its sizes are
        those of blocks then; nothing says yet that they are true."""
        if (header.format, header.root) != (self._format, root):
            return False
        if not 0 <= header.entry < len(keys) or header.key != keys[header.entry]:
            return False
        return len(header.sizes) == len(self._sizes) and all(
            size in (0, own) for size, own in zip(header.sizes, self._sizes, strict=True)
        )

    def is_authentic(self, header: KVHeader, contents: Sequence[bytes | memoryview], mac: bytes) -> bool:
        """Whether an engine that knows the secret made this object. Nobody else may be able to change its contents while this
        reads them, or later."""
        if header.sizes != tuple(len(content) for content in contents):
            return False
        return hmac.compare_digest(mac, self._authenticate(header, contents))

    def _authenticate(self, header: KVHeader, contents: Sequence[bytes | memoryview]) -> bytes:
        mac = hmac.new(self._key, msgspec.msgpack.encode(header), "sha256")
        for content in contents:  # each hash has 16 bytes, and the header says how long its content is
            mac.update(self._hash.encrypt(_NONCE, b"", content))
        return mac.digest()


class KVQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks an engine for KV.

    Attributes:
        request_id: of the request whose hold on the KV ends when all of it was sent.
        root: root of the chain.
        keys: prefix keys, by entry.
        num_known: number of leading entries that the asker has, for layers that see all positions.
        follows: the request's prompt is being computed there: entries are sent as they are done, until the last one is.
    """

    request_id: str
    root: bytes
    keys: list[bytes]
    num_known: int = 0
    follows: bool = False

    def __repr__(self) -> str:
        """Shows no key: where a scope has no secret, a key tells whether somebody's text is known."""
        return f"KVQuery(num_keys={len(self.keys)}, num_known={self.num_known})"
