"""What a piece of text or a run of numbers looks like in memory: every encoding that software here is known to use. Pure.

A needle is two or more pieces at fixed distances. One piece is enough for bytes in a row; a Python list of integers that were
allocated one after another needs a piece for each, a chunk apart.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

SHORTEST: Final = 16
"""Bytes that a needle must have: fewer are found by chance."""
RUN: Final = 4
"""Token ids in a row that tell a prompt."""
_PACKED_RUN: Final = 6
_INT_CHUNKS: Final = (32, 48)
"""Distance of two CPython integers below 2^30 that were allocated in a row: from its own pools, and from malloc."""


@dataclass(frozen=True, slots=True)
class Needle:
    """What to look for.

    Attributes:
        kind: the encoding, such as "utf-8".
        owner: number of whatever it came from, such as a request.
        pieces: (distance from the start, bytes), the first at 0 and of at least 8 bytes.
    """

    kind: str
    owner: int
    pieces: tuple[tuple[int, bytes], ...]

    @property
    def reach(self) -> int:
        """Bytes from the start to the end of the last piece."""
        return max(distance + len(piece) for distance, piece in self.pieces)


def of_bytes(kind: str, owner: int, data: bytes) -> Needle:
    """Returns a needle for bytes in a row.

    Raises:
        ValueError: they are fewer than `SHORTEST`, and chance would find them.
    """
    if len(data) < SHORTEST:
        raise ValueError(f"a needle of {len(data)} bytes is found by chance; give at least {SHORTEST}")
    return Needle(kind, owner, ((0, data),))


def of_text(text: str, owner: int, prefix: str = "") -> Iterator[Needle]:
    """Yields the encodings of a text of at least 16 characters, no two alike.

    UTF-16 and UTF-32 are also what CPython keeps a text in that has one wide character anywhere (PEP 393).
    """
    utf8 = text.encode()
    forms = {
        "utf-8": utf8,
        "utf-16": text.encode("utf-16-le"),
        "utf-32": text.encode("utf-32-le"),
        "json": json.dumps(text)[1:-1].encode(),
        "hex": utf8.hex().encode(),
        **{f"base64+{shift}": _base64(utf8, shift) for shift in range(3)},
    }
    if all(ord(letter) < 256 for letter in text):
        forms["latin-1"] = text.encode("latin-1")
    seen: set[bytes] = set()
    for kind, data in forms.items():
        if data not in seen:
            seen.add(data)
            yield of_bytes(prefix + kind, owner, data)


def of_token_ids(token_ids: Sequence[int], owner: int, prefix: str = "") -> Iterator[Needle]:
    """Yields needles for every fourth run of four ids: arrays, lists of Python integers, msgpack, decimals with commas.

    Ids of no more than two decimal digits make needles that chance finds; give others.
    """
    for start in range(0, len(token_ids) - RUN + 1, RUN):
        run = token_ids[start : start + RUN]
        yield of_bytes(f"{prefix}int32", owner, struct.pack(f"<{RUN}i", *run))
        yield of_bytes(f"{prefix}int64", owner, struct.pack(f"<{RUN}q", *run))
        for way, ids in (("", run), (" backwards", run[::-1])):
            for chunk in _INT_CHUNKS:
                pieces = tuple((place * chunk, struct.pack("<Ii", 0, token_id)) for place, token_id in enumerate(ids))
                yield Needle(f"{prefix}python ints {chunk} apart{way}", owner, pieces)
    for start in range(0, len(token_ids) - _PACKED_RUN + 1, _PACKED_RUN):
        run = token_ids[start : start + _PACKED_RUN]
        yield of_bytes(f"{prefix}msgpack", owner, b"".join(map(_msgpack, run)))
        yield of_bytes(f"{prefix}decimals", owner, ",".join(map(str, run)).encode())
        yield of_bytes(f"{prefix}decimals", owner, ", ".join(map(str, run)).encode())


def _base64(data: bytes, shift: int) -> bytes:
    """Returns what of base64 is the same whatever stands around `data`, when `shift` bytes stand before it."""
    coded = base64.b64encode(bytes(shift) + data)
    first = (0, 2, 3)[shift]
    whole = (shift + len(data)) // 3 * 4
    return coded[first:whole]


def _msgpack(value: int) -> bytes:
    if value < 0x80:
        return struct.pack("B", value)
    if value < 0x100:
        return b"\xcc" + struct.pack("B", value)
    if value < 0x10000:
        return b"\xcd" + struct.pack(">H", value)
    return b"\xce" + struct.pack(">I", value)
