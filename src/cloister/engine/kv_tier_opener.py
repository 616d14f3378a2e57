"""Opens the sealed blocks of a tier, many with one call (decisions/0056).

`cryptography` opens one block per call. For a small block the Python around the call takes as long as AES-GCM itself, and each
call releases Python's lock and waits for it again. The system's libcrypto, which is OpenSSL too, is called once for a whole run
of blocks, without that lock. It may be an older version, which takes longer for each byte, so a tier measures at its start
which way is faster for its blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from importlib import import_module
from typing import Final, Protocol, cast

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.kv.tier_slots import TAG_BYTES, TierBlock

DESCRIBED: Final = struct.Struct("<32sQI")
"""Prefix key, entry and group of a block, which are authenticated behind the bytes of its chain."""
_RECORD: Final = struct.Struct("<QQQ12s32sQI")
"""The compiled opener's description of a block: where its sealed bytes begin, the length of its contents, where they go; its
nonce; and the fields of `DESCRIBED`. (cpp/block_opener.cpp)"""

_encode: Final = msgspec.msgpack.Encoder().encode


class BlockOpener(Protocol):
    """Opens blocks that one key has sealed; any thread may call it."""

    def open(self, sealed: memoryview, chain: bytes, records: bytes, room: memoryview) -> bytes:
        """Writes contents to their room; returns a byte for each block: 1, or 0 for one that does not open.

        Raises:
            ValueError: contents would lie outside of their room; nothing was written.
        """
        ...


def describe_chain(form: bytes, root: bytes) -> bytes:
    """Returns the authenticated data of a chain, the same for each of its blocks; no other chain or format has this prefix."""
    return _encode((b"cloister/kv-tier/2", form, root))


def describe_block(block: TierBlock) -> bytes:
    """Returns the authenticated data of a block, which follow those of its chain."""
    return DESCRIBED.pack(block.key, block.entry, block.group)


def make_nonce(block: TierBlock) -> bytes:
    """Returns a 12-byte nonce that is used once: keys belong to one engine, which numbers its sealings."""
    return block.number.to_bytes(12, "big")


def pack_record(block: TierBlock, place: int, size: int, out: int) -> bytes:
    """Returns the opener's description of a block.

    Args:
        place: where it begins in what was read.
        size: bytes of its contents.
        out: where they begin in their room.
    """
    return _RECORD.pack(place, size, out, make_nonce(block), block.key, block.entry, block.group)


def find_opener() -> Callable[[memoryview], BlockOpener] | None:
    """Returns a factory of openers, by key; None without compiled kernels, or without a libcrypto that opens what
    `cryptography` has sealed, and nothing else."""
    try:
        native = import_module("cloister.backends.native._native")
    except ImportError:
        return None
    if not native.find_libcrypto():
        return None
    make = cast("Callable[[memoryview], BlockOpener]", native.BlockOpener)
    return make if _is_right(make) else None


def _is_right(make: Callable[[memoryview], BlockOpener]) -> bool:
    """Whether an opener opens what `cryptography` seals, and nothing that was changed."""
    key = AESGCM.generate_key(256)
    content = bytes(range(256)) * 3 + b"end"
    block = TierBlock(b"root", bytes(32), b"", 0, 1, 7, 2**40 + 5, 0)
    chain = describe_chain(b"form", b"root")
    sealed = AESGCM(key).encrypt(make_nonce(block), content, chain + describe_block(block))
    changed = bytearray(sealed)
    changed[len(content) // 2] ^= 1
    both, size = memoryview(sealed + changed), len(content)
    records = pack_record(block, 0, size, 0) + pack_record(block, size + TAG_BYTES, size, size)
    room = memoryview(bytearray(2 * size))
    opened = make(memoryview(key)).open(both, chain, records, room)
    return opened == b"\1\0" and room[:size] == content and not any(room[size:])
