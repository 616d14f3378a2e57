"""KV objects: the blocks of one entry of a block table, which say themselves what they are. Pure: no I/O, no clock, no arrays.

An object is found by its prefix key, which covers the scope, the model, the adapter and all tokens up to its end. What carries
it need not be trusted: without the engines' key nobody can make one, or change one. Whatever does not match is a
miss, and its positions are computed.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import msgspec


class KVHeader(msgspec.Struct, frozen=True, array_like=True):
    """What an object says of itself.

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
        mac: HMAC-SHA256 of the header and the contents.
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


class RestoredEntry(msgspec.Struct, frozen=True):
    """One entry of a block table, from a tier of this engine, which has checked it.

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

    Args:
        form: the format of this engine.
        key: secret of the engines that exchange KV.
    """

    def __init__(self, form: KVFormat, key: bytes) -> None:
        self._format, self._sizes, self._key = form.digest, form.sizes, key

    def seal(self, root: bytes, key: bytes, entry: int, contents: tuple[bytes, ...]) -> KVObject:
        """Returns an object with these contents."""
        header = KVHeader(self._format, root, key, entry, tuple(len(content) for content in contents))
        return KVObject(header, contents, self._authenticate(header, contents))

    def is_genuine(self, found: KVObject, root: bytes, keys: list[bytes]) -> bool:
        """Whether an object is what was asked for: of this format, scope and adapter, under the key of its entry, and made by
        an engine that knows the secret.

        Args:
            keys: prefix keys of the request, by entry.
        """
        header = found.header
        if (header.format, header.root) != (self._format, root):
            return False
        if not 0 <= header.entry < len(keys) or header.key != keys[header.entry]:
            return False
        if len(header.sizes) != len(self._sizes) or header.sizes != tuple(len(content) for content in found.contents):
            return False
        if any(size not in (0, own) for size, own in zip(header.sizes, self._sizes, strict=True)):
            return False
        return hmac.compare_digest(found.mac, self._authenticate(header, found.contents))

    def _authenticate(self, header: KVHeader, contents: tuple[bytes, ...]) -> bytes:
        mac = hmac.new(self._key, msgspec.msgpack.encode(header), "sha256")
        for content in contents:  # the header says where each ends
            mac.update(content)
        return mac.digest()


class KVQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks an engine for KV.

    Attributes:
        request_id: of the request whose hold on the KV ends when all of it was sent.
        root: root of the chain.
        keys: prefix keys, by entry.
        num_known: the asker has so many leading entries, for layers that see all positions.
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
