"""Variable-length integers of QUIC (RFC 9000, section 16): one, two, four or eight bytes, up to 2^62 - 1."""

from __future__ import annotations

from typing import Final

MAX_VARINT: Final = 2**62 - 1


def encode_varint(value: int) -> bytes:
    """Returns `value` in as few bytes as hold it.

    Raises:
        ValueError: it is negative or above `MAX_VARINT`.
    """
    for power, num_bytes in enumerate((1, 2, 4, 8)):
        if 0 <= value < 1 << (8 * num_bytes - 2):
            return (value | power << (8 * num_bytes - 2)).to_bytes(num_bytes, "big")
    raise ValueError("a QUIC integer is from 0 to 2^62 - 1")


def varint_bytes(first: int) -> int:
    """Returns how many bytes an integer takes whose first byte is `first`."""
    return 1 << (first >> 6)


def decode_varint(data: bytes | bytearray) -> int:
    """Returns the integer that fills the whole of `data`, whose length is `varint_bytes(data[0])`."""
    return int.from_bytes(data, "big") & (1 << (8 * len(data) - 2)) - 1
